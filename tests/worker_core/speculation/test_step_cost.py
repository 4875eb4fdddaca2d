"""The learned step times rise, are near the truth, and withstand one bad timing."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from worker_core.speculation.draft_lengths import DraftCurve, rounded


@given(st.integers(0, 10_000), st.integers(2, 6))
def test_rounding_keeps_leading_digits(number: int, num_bits: int) -> None:
    kept = rounded(number, num_bits)
    assert kept <= number
    assert number < kept + max(1, kept >> (num_bits - 1)) or kept == number


timings = st.lists(st.tuples(st.integers(0, 100), st.floats(1e-4, 1.0)), max_size=40)


@given(timings)
def test_a_curve_never_falls(timed: list[tuple[int, float]]) -> None:
    curve = DraftCurve()
    curve.observe(4, 0, 0.01)
    for num_drafts, seconds in timed:
        curve.observe(4, num_drafts, seconds)
    values = [curve.seconds(drafts) for drafts in range(200)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
    assert values[0] > 0


@given(st.floats(0.001, 0.1), st.floats(0.0, 0.01), st.sets(st.integers(1, 7), min_size=1))
def test_a_straight_line_is_learned(base: float, slope: float, sizes: set[int]) -> None:
    curve = DraftCurve()
    for _ in range(3):
        for drafts in (0, *sizes):
            curve.observe(1, drafts, base + slope * drafts)
    for drafts in range(max(sizes) + 1):
        assert abs(curve.seconds(drafts) - (base + slope * drafts)) < 1e-9


def test_what_slows_every_step_down_is_no_price_of_drafts() -> None:
    """Contexts grow while nothing is drafted: what was learned of drafts before still holds."""
    curve = DraftCurve()
    for _ in range(9):
        curve.observe(8, 0, 1.0)
        curve.observe(8, 4, 1.5)
    for _ in range(9):
        curve.observe(8, 0, 3.0)
    assert abs(curve.seconds(4) - 4.5) < 1e-9


def test_a_bad_timing_is_forgotten() -> None:
    curve = DraftCurve()
    for i in range(30):
        curve.observe(1, 0, 9.0 if i == 12 else 1.0)
        curve.observe(1, 4, 50.0 if i > 26 else 1.2)
    assert curve.seconds(0) == 1.0
    assert 1.1 < curve.seconds(4) < 1.4


def test_unknown_numbers_of_drafts_cost_something_but_less_than_in_proportion() -> None:
    curve = DraftCurve()
    curve.observe(4, 0, 1.0)
    assert 1.0 < curve.seconds(4) < 2.0
