"""Which cells of a matrix of parameters each run tries."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.support.pairwise import pairwise


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_every_pair_of_values_is_tried_and_the_other_cells_are_long(sizes: list[int]) -> None:
    axes = {str(axis): list(range(size)) for axis, size in enumerate(sizes)}
    names, params = pairwise(**axes).args
    assert names == list(axes)
    assert [param.values for param in params] == list(product(*axes.values()))
    tried = [param.values for param in params if not param.marks]
    assert all(mark.name == "long" for param in params for mark in param.marks)

    def pairs(cells: list[tuple[object, ...]]) -> set[object]:
        return {pair for cell in cells for pair in combinations(enumerate(cell), 2)}

    assert pairs(tried) == pairs([param.values for param in params])
    largest = sorted(sizes)[-2:]
    assert len(tried) <= 2 * (largest[0] * largest[-1])


def test_a_matrix_of_three_axes_is_tried_by_a_third() -> None:
    (_, params) = pairwise(a=range(8), b=range(3), c=range(3)).args
    assert sum(not param.marks for param in params) == 24
