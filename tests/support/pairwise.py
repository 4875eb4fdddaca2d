"""Matrices of parameters of which each run tries every pair of values, and .ci/run the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

Pairs = frozenset[tuple[tuple[int, int], ...]]


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """All combinations of two axes or more. Those beyond a set that has each value of an axis with
    each of every other are marked `long`."""
    cells = list(product(*(range(len(values)) for values in axes.values())))
    chosen = _covering(cells)
    names = list(axes)
    params = [
        pytest.param(
            *(axes[name][at] for name, at in zip(names, cell, strict=True)),
            marks=[] if cell in chosen else [pytest.mark.long],
        )
        for cell in cells
    ]
    return pytest.mark.parametrize(names, params)


def _covering(cells: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Cells that together have all pairs: by turns the first of those that add the most."""
    missing = set().union(*map(_pairs, cells))
    chosen = set()
    while missing:
        best = max(cells, key=lambda cell: len(_pairs(cell) & missing))
        chosen.add(best)
        missing -= _pairs(best)
    return chosen


def _pairs(cell: tuple[int, ...]) -> Pairs:
    """The pairs of (axis, value) in it."""
    return frozenset(combinations(enumerate(cell), 2))
