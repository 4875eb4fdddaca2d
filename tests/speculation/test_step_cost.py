"""What is learned of steps' times: rising, near the truth, and not thrown off by one bad timing."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from decode_svc.speculation.step_cost import RowCurve, StepCost, rounded


@given(st.integers(0, 10_000), st.integers(2, 6))
def test_rounding_keeps_leading_digits(number: int, num_bits: int) -> None:
    kept = rounded(number, num_bits)
    assert kept <= number
    assert number < kept + max(1, kept >> (num_bits - 1)) or kept == number


timings = st.lists(st.tuples(st.integers(1, 200), st.floats(1e-4, 1.0)), min_size=1, max_size=40)


@given(timings)
def test_a_curve_never_falls(timed: list[tuple[int, float]]) -> None:
    curve = RowCurve()
    for num_rows, seconds in timed:
        curve.observe(num_rows, seconds)
    values = [curve.seconds(rows) for rows in range(1, 300)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
    assert min(s for _, s in timed) - 1e-12 <= values[0]


@given(st.floats(0.001, 0.1), st.floats(0.0, 0.01), st.sets(st.integers(1, 31), min_size=2))
def test_a_straight_line_is_learned(base: float, slope: float, sizes: set[int]) -> None:
    curve = RowCurve()
    for _ in range(3):
        for rows in sizes:
            curve.observe(rows, base + slope * rows)
    for rows in range(min(sizes), max(sizes) + 1):
        assert abs(curve.seconds(rows) - (base + slope * rows)) < 1e-9


def test_a_bad_timing_is_forgotten() -> None:
    curve = RowCurve()
    for i in range(30):
        curve.observe(1, 1.0)
        curve.observe(5, 50.0 if i == 10 else 1.2)
    assert 1.0 <= curve.seconds(1) < 1.1
    assert 1.1 < curve.seconds(5) < 1.4


def test_unknown_sizes_cost_more_than_known_ones_but_less_than_in_proportion() -> None:
    curve = RowCurve()
    curve.observe(4, 1.0)
    assert 1.0 < curve.seconds(8) < 2.0


def test_numbers_of_sequences_are_told_apart() -> None:
    costs = StepCost()
    assert costs.curve(1) is None
    costs.observe(1, 1, 1.0)
    assert costs.curve(2) is None
    costs.observe(64, 64, 9.0)
    one, many = costs.curve(1), costs.curve(66)
    assert one is not None
    assert many is not None
    assert one.seconds(1) == 1.0
    assert many.seconds(64) == 9.0
