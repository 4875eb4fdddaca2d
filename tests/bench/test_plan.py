"""The plan runs every rate on every target, in turns, with the same requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.plan import Arrivals, ArrivalsError, LoadOptions, Run, entries_of, load_of, runs_of

OPTIONS = LoadOptions(num_requests=6, num_input_tokens=20, num_output_tokens=10)
RATES = st.lists(st.floats(0.1, 100), min_size=1, max_size=4, unique=True)


@given(RATES, st.integers(1, 4))
def test_targets_take_turns_within_each_rate(rates: list[float], repetitions: int) -> None:
    runs = runs_of(("split", "colocated"), rates, repetitions)
    assert Counter(runs).most_common(1)[0][1] == 1
    assert len(runs) == 2 * len(rates) * repetitions
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    for one, other in pairs:
        assert replace(one, target="") == replace(other, target="")
        assert {one.target, other.target} == {"split", "colocated"}
    firsts = Counter(one.target for one, _ in pairs)
    assert abs(firsts["split"] - firsts["colocated"]) <= 1
    assert [run.rate for run in runs] == sorted(run.rate or 0.0 for run in runs)


@pytest.mark.parametrize("arrivals", ["poisson", "burst"])
def test_targets_get_the_same_load_and_repetitions_other_times(arrivals: Arrivals) -> None:
    options = replace(OPTIONS, arrivals=arrivals, burst_size=2)
    entries = entries_of(options, 512)
    one, other, again = (
        load_of(options, entries, run, 100)
        for run in (Run("split", 2.0, 0), Run("colocated", 2.0, 0), Run("split", 2.0, 1))
    )
    assert one == other
    assert one[1] == 2.0
    assert [r.prompt_token_ids for r in one[0]] == [r.prompt_token_ids for r in again[0]]
    assert [r.due_s for r in one[0]] != [r.due_s for r in again[0]]


def test_requests_are_cut_to_the_shorter_of_both_limits() -> None:
    for limit, own in ((16, 512), (512, 16)):
        entries = entries_of(replace(OPTIONS, max_model_len=limit), own)
        assert max(e.num_input_tokens + e.num_output_tokens for e in entries) <= 16


def test_only_a_trace_has_a_rate_of_its_own() -> None:
    with pytest.raises(ArrivalsError):
        load_of(OPTIONS, entries_of(OPTIONS, 512), Run("split", None, 0), 100)
