"""`baton check --faults`: real processes of a user's model, killed and frozen under streams."""

from __future__ import annotations

import pytest

from baton.check import fault_load
from baton.check import faults as fault_check
from baton.check.faults import check_faults
from baton.check.process_faults import PROCESS_FAULTS
from tests.support.live_tiers import BOX_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.asyncio
async def test_what_is_killed_breaks_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_check, "MAX_TOKENS", 64)
    monkeypatch.setattr(fault_load, "QUIET_S", 1.0)
    kinds = ("kill a decode worker", "kill the gateway")
    faults = [fault for fault in PROCESS_FAULTS if fault.name in kinds]
    over: list[str] = []
    verdict = await check_faults(
        {"model": str(BOX_MODEL), "dtype": "float32", "log_level": "error"},
        num_requests=8,
        num_rounds=1,
        max_hours=1.0,
        seed=1,
        on_fault=lambda fault, _: over.append(fault),
        faults=faults,
    )
    assert verdict.has_held, verdict
    assert over == list(kinds)
    none, *results = verdict.results
    assert none.num_streams
    assert all(result.num_streams for result in results)
    assert sum(result.num_streams for result in verdict.by_prompt) == sum(
        result.num_streams for result in results
    )
