"""Arrival processes: how many, in which order, how fast."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.plan import ArrivalsError, burst, mean_rate, poisson, replay

SEEDS = st.integers(0, 2**32)
COUNTS = st.integers(1, 300)
RATES = st.floats(0.01, 1000)
TIMES = st.lists(st.integers(0, 10**6), min_size=2, max_size=50).map(
    lambda times: [time / 1000 for time in sorted(times)]
)


@given(SEEDS, COUNTS, RATES, st.integers(1, 20))
def test_they_begin_at_zero_ascend_and_are_as_many_as_asked_for(
    seed: int, count: int, rate: float, size: int
) -> None:
    for times in (poisson(count, rate, Random(seed)), burst(count, rate, size, Random(seed))):
        assert len(times) == count
        assert times[0] == 0.0
        assert list(times) == sorted(times)


@given(SEEDS, COUNTS, RATES)
def test_the_same_seed_gives_the_same_arrivals_at_any_speed(
    seed: int, count: int, rate: float
) -> None:
    slow, fast = poisson(count, rate, Random(seed)), poisson(count, 2 * rate, Random(seed))
    assert slow == poisson(count, rate, Random(seed))
    assert [2 * time for time in fast] == pytest.approx(list(slow))


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_poisson_gaps_have_the_rates_mean_and_spread(rate: float) -> None:
    times = poisson(20_000, rate, Random(1))
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean * rate == pytest.approx(1, rel=0.03)
    # The deviation of an exponential is its mean: neither even gaps nor bursts.
    assert variance**0.5 * rate == pytest.approx(1, rel=0.05)


@given(SEEDS, COUNTS, st.integers(1, 20))
def test_bursts_come_at_once_and_are_full_but_the_last(seed: int, count: int, size: int) -> None:
    sizes = list(Counter(burst(count, 10.0, size, Random(seed))).values())
    assert sizes[:-1] == [size] * (len(sizes) - 1)
    assert sizes[-1] == (count - 1) % size + 1


def test_bursts_keep_the_mean_rate() -> None:
    times = burst(40_000, 8.0, 4, Random(2))
    assert mean_rate(times) == pytest.approx(8, rel=0.03)


@given(TIMES, RATES)
def test_a_replay_keeps_the_pattern_and_takes_the_rate(times: list[float], rate: float) -> None:
    moved = replay(times)
    assert moved == tuple(time - times[0] for time in times)
    if times[0] == times[-1]:
        with pytest.raises(ArrivalsError):
            replay(times, rate)
        return
    stretched = replay(times, rate)
    assert mean_rate(stretched) == pytest.approx(rate)
    factor = stretched[-1] / moved[-1]
    assert list(stretched) == pytest.approx([time * factor for time in moved])


def test_what_cannot_be_made_is_refused() -> None:
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(ArrivalsError):
            poisson(3, rate, Random(0))
    with pytest.raises(ArrivalsError):
        burst(3, 1.0, 0, Random(0))
    with pytest.raises(ArrivalsError):
        replay([2.0, 1.0])
