"""`baton check --faults`: real processes of a user's model, killed and frozen under streams; and
`baton check --soak`, for seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.check import fault_load
from baton.check import faults as fault_check
from baton.check import soak as soak_check
from baton.check.faults import check_faults
from baton.check.process_faults import PROCESS_FAULTS
from baton.check.soak import BOUNDS, soak
from tests.support.adapters import make_adapter
from tests.support.live_tiers import BOX_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.asyncio
async def test_what_is_killed_breaks_no_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the SDK and by both ways of server-sent events, of the model and of an adapter."""
    adapter = make_adapter(tmp_path / "adapter", BOX_MODEL)
    monkeypatch.setattr(fault_check, "MAX_TOKENS", 64)
    monkeypatch.setattr(fault_load, "QUIET_S", 1.0)
    kinds = ("kill a decode worker", "kill the gateway")
    faults = [fault for fault in PROCESS_FAULTS if fault.name in kinds]
    over: list[str] = []
    verdict = await check_faults(
        {
            "model": str(BOX_MODEL),
            "dtype": "float32",
            "log_level": "error",
            "kv_transport": "tcp",
            "kv_cache_memory_bytes": "64MiB",
            "lora_modules": (f"a={adapter}",),
        },
        num_requests=16,
        num_rounds=1,
        max_hours=1.0,
        seed=1,
        on_fault=lambda fault, _: over.append(fault),
        faults=faults,
    )
    assert verdict.has_held, verdict
    assert over == list(kinds)
    assert len(verdict.by_door) == 3
    assert all(result.num_streams for result in verdict.by_door)
    none, *results = verdict.results
    assert none.num_streams
    assert all(result.num_streams for result in results)
    assert sum(result.num_streams for result in verdict.by_prompt) == sum(
        result.num_streams for result in results
    )


@pytest.mark.asyncio
async def test_a_soak_measures_every_process_and_nothing_is_held_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As short as that, what its processes hold still grows."""
    monkeypatch.setattr(soak_check, "SAMPLE_EVERY_S", 0.5)
    monkeypatch.setattr(soak_check, "DISCONNECT_EVERY_S", 0.2)
    seen: list[float] = []
    verdict = await soak(
        {"model": str(BOX_MODEL), "engine": "oracle", "log_level": "error"},
        hours=8 / 3600,
        num_requests=4,
        seed=1,
        on_progress=lambda hours, _: seen.append(hours),
    )
    assert verdict.held.is_nothing
    assert not verdict.deaths
    counts = verdict.counts
    assert (counts.num_wrong, counts.errors.total()) == (0, 0)
    assert counts.num_streams > counts.num_cancelled > 0
    assert counts.num_disconnects > 2
    workers = {f"{tier}-{number}" for tier in ("prefill", "decode") for number in (0, 1)}
    quantities = {trend.quantity for trend in verdict.trends if trend.process in workers}
    assert quantities == {*BOUNDS}
    assert {trend.process for trend in verdict.trends} == workers | {"gateway"}
    assert seen == sorted(seen)
    assert seen
