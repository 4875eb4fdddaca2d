"""Shapes of captured decode steps, and the choice of a shape for a step. Pure.

A shape is a number of sequences and a number of attention items (ranges of keys). A sequence has
one item per range of its context, so the items of a shape limit the context lengths that it can
take; one long context among short ones needs few items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count, takewhile


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """num_seqs sequences with one new token each; at most num_items items of attention in the plan
    of any window."""

    num_seqs: int
    num_items: int

    @property
    def num_merges(self) -> int:
        """Sequences that may have several items, merged afterwards: 0 if there is only one item per
        sequence."""
        return self.num_seqs if self.num_items > self.num_seqs else 0

    def holds(self, num_seqs: int, num_items: int) -> bool:
        """Whether the step can be padded to this shape by sequences of one item each. Without room
        for merges, no sequence can have a second item."""
        num_idle = self.num_seqs - num_seqs
        return num_idle >= 0 and num_items + num_idle <= self.num_items


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Powers of two, from 16 on also the midpoints between them, and `largest`, ascending. At most
    half of the rows are padding, from 16 on at most a third."""
    sizes = chain((1, 2, 4, 8), chain.from_iterable((1 << n, 3 << (n - 1)) for n in count(4)))
    return (*takewhile(lambda size: size < largest, sizes), largest)


def step_shapes(
    largest_batch: int, items_per_seq: int, max_items: int | None = None
) -> tuple[StepShape, ...]:
    """All shapes, ascending: for each batch size, 1, 2, 4, ... times as many items, up to
    items_per_seq times as many, but at most max_items (at least largest_batch).

    items_per_seq: items of the longest sequence.
    """
    return tuple(
        sorted(
            {
                StepShape(size, max(size, min(size * level, max_items or size * level)))
                for size in batch_sizes(largest_batch)
                for level in _levels(items_per_seq)
            }
        )
    )


def _levels(most: int) -> tuple[int, ...]:
    return (*takewhile(lambda level: level < most, (1 << n for n in count())), most)


def choose_shape(shapes: Sequence[StepShape], num_seqs: int, num_items: int) -> StepShape | None:
    """The first of the ascending `shapes` that the step can be padded to, or None."""
    return next((s for s in shapes if s.holds(num_seqs, num_items)), None)
