"""Shapes that are given latency targets, beside fixed ones: never clearly worse, and better under
overload."""

from __future__ import annotations

import pytest

from bench.slo import MAX_LOSS, cells_at, load_of


@pytest.mark.slow
@pytest.mark.parametrize("rate", [4.0, pytest.param(2.0, marks=pytest.mark.long)])
def test_targets_are_kept_at_least_as_well_as_by_the_best_fixed_shape(rate: float) -> None:
    cells = cells_at("drawn", rate, [load_of(rate, 0, 40)])
    for cell in cells:
        assert cell.gain >= -MAX_LOSS, cell
    assert sum(cell.gain for cell in cells) > 0
