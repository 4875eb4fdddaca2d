"""Steady answers around bursts, and the report of each."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measure import Record, Slo
from bench.split import Steady, mixed_load, summarise_mixed
from engine.plan.trace import TraceEntry

ENTRIES = st.lists(
    st.builds(TraceEntry, st.just(0.0), st.integers(1, 60), st.integers(1, 9)),
    min_size=1,
    max_size=9,
)


@given(ENTRIES, st.floats(0.5, 8), st.integers(1, 4), st.floats(0.5, 8), st.integers(0, 3))
def test_answers_are_written_from_before_the_first_burst_until_after_the_last(
    entries: list[TraceEntry], rate: float, burst_size: int, steady_rate: float, seed: int
) -> None:
    load = mixed_load(Steady(steady_rate, 8, 20), entries, rate, burst_size, 100, seed)
    steady = [request.due_s for request in load.steady]
    bursts = [request.due_s for request in load.bursts]
    assert steady[0] == 0.0
    assert steady[1] < bursts[0]
    assert bursts[-1] <= steady[-1] + 1 / steady_rate
    gaps = [after - before for before, after in pairwise(steady)]
    assert gaps == pytest.approx([1 / steady_rate] * len(gaps))


@given(ENTRIES, st.integers(0, 3))
def test_every_target_gets_the_same_load(entries: list[TraceEntry], seed: int) -> None:
    one, other = (mixed_load(Steady(), entries, 2.0, 3, 100, seed) for _ in range(2))
    assert one == other
    assert [len(r.prompt_token_ids) for r in one.bursts] == [e.num_input_tokens for e in entries]


def test_gaps_are_of_steady_answers_and_waits_of_each_kind() -> None:
    steady = Record(0.0, 0.0, 2.0, 8, pieces=((0.1, 1), (0.2, 1), (0.7, 1)))
    long = Record(1.0, 1.0, 9.0, 80, pieces=((3.0, 1), (9.0, 1)))
    lost = Record(1.0, 1.0, 2.0, 80, error="OVERLOADED")
    told = summarise_mixed([steady], [long, lost], Slo(ttft_ms=500.0))
    assert told.itl_ms.count == 2
    assert told.itl_ms.max == pytest.approx(500.0)
    assert told.steady_ttft_ms.p50 == pytest.approx(100.0)
    assert told.burst_ttft_ms.p99 == pytest.approx(2000.0)
    assert told.num_failed == 1
    assert told.attainment == pytest.approx(1 / 3)
