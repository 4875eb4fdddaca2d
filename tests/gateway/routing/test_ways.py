"""Which way a prompt goes: the soonest that keeps the targets."""

from __future__ import annotations

import pytest

from baton.types import NO_SLO, Slo
from gateway.routing.ways import Way, choose_way

HANDOFF = Way("p", "d", 1.0)


@pytest.mark.parametrize(
    ("ways", "slo", "expected"),
    [
        pytest.param([HANDOFF, Way(None, "d", 0.9)], NO_SLO, "p", id="hardly sooner"),
        pytest.param([HANDOFF, Way(None, "d", 0.7)], NO_SLO, None, id="clearly sooner"),
        pytest.param([HANDOFF, Way(None, "d", 0.9)], Slo(0.5), None, id="else late"),
        pytest.param([HANDOFF, Way(None, "d", 0.9)], Slo(2.0), "p", id="in time"),
        pytest.param([HANDOFF, Way(None, "d", 0.9)], Slo(None, 0.05), None, id="gaps are kept"),
        pytest.param(
            [HANDOFF, Way(None, "c", 0.9, is_colocated=True)], NO_SLO, None, id="meant for it"
        ),
        pytest.param(
            [HANDOFF, Way(None, "c", 1.0, is_colocated=True)], NO_SLO, "p", id="no sooner"
        ),
    ],
)
def test_the_soonest_way_wins_if_it_slows_nobody(
    ways: list[Way], slo: Slo, expected: str | None
) -> None:
    assert choose_way(ways, slo).prefill == expected
    assert choose_way(ways[::-1], slo).prefill == expected, "the order does not matter"
