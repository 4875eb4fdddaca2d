"""The slopes by context length are measured, and a step copies and looks up nothing of its
context's length."""

from __future__ import annotations

import pytest

from bench.context_slopes import PER_PROMPT, Slope, host_parts, measure, table, too_steep


def test_the_exponent_is_that_of_the_power() -> None:
    lengths = (1024, 4096, 65536)
    assert Slope("flat", dict.fromkeys(lengths, 3e-6)).exponent == pytest.approx(0)
    assert Slope("linear", {n: 2e-9 * n for n in lengths}).exponent == pytest.approx(1)
    assert Slope("square", {n: 1e-12 * n * n for n in lengths}).exponent == pytest.approx(2)


def test_parts_that_grow_with_the_context_are_named() -> None:
    lengths = (1024, 65536)
    linear = {n: 2e-9 * n for n in lengths}
    assert too_steep([Slope("decode", dict.fromkeys(lengths, 3e-6)), Slope("open", linear)]) == []
    square = {n: 1e-12 * n * n for n in lengths}
    (first, second) = too_steep([Slope("decode", linear), Slope("open", square)])
    assert first.startswith("decode: slope 1.00")
    assert second.startswith("open: slope 2.00")


@pytest.mark.slow
def test_all_parts_are_measured_at_all_lengths() -> None:
    slopes = measure((1024, 2048), host_parts)
    assert {slope.part for slope in slopes} > PER_PROMPT
    for slope in slopes:
        assert min(slope.seconds.values()) > 0
        assert f"| {slope.part} |" in table(slopes)
