"""Which shapes decode steps are captured in, and which one a step takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.step_shapes import StepShape, batch_sizes, choose_shape, step_shapes


def test_batch_sizes_grow_by_halves_and_thirds() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(7) == (1, 2, 4, 7)
    assert batch_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)


def test_shapes_are_in_ascending_order_without_repeats() -> None:
    assert step_shapes(4, 3) == tuple(
        StepShape(*numbers)
        for numbers in ((1, 1), (1, 2), (1, 3), (2, 2), (2, 4), (2, 6), (4, 4), (4, 8), (4, 12))
    )


def test_items_are_bounded() -> None:
    assert {shape.num_items for shape in step_shapes(4, 100, 10)} == {1, 2, 4, 8, 10}


def test_sequences_of_several_items_need_merges() -> None:
    shapes = step_shapes(8, 4)
    assert choose_shape(shapes, 4, 4) == StepShape(4, 4)
    assert choose_shape(shapes, 3, 4) == StepShape(4, 8)
    # Each of the sequences that fill the batch up has an item.
    assert choose_shape(shapes, 5, 13) == StepShape(8, 16)
    assert choose_shape(shapes, 5, 14) == StepShape(8, 32)


def test_what_is_too_large_has_no_shape() -> None:
    assert choose_shape(step_shapes(8, 4), 9, 9) is None
    assert choose_shape(step_shapes(8, 4, 8), 8, 9) is None


@given(
    largest=st.integers(1, 300),
    items_per_seq=st.integers(1, 40),
    items=st.lists(st.integers(1, 40), min_size=1, max_size=300),
)
def test_every_batch_within_the_limits_has_a_shape_that_wastes_little(
    largest: int, items_per_seq: int, items: list[int]
) -> None:
    items = [min(n, items_per_seq) for n in items[:largest]]
    shape = choose_shape(step_shapes(largest, items_per_seq), len(items), sum(items))
    assert shape is not None
    assert shape.holds(len(items), sum(items))
    assert shape.num_seqs < 2 * len(items)
    assert shape.num_items <= 2 * (sum(items) + shape.num_seqs)
