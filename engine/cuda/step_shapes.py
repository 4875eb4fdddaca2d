"""The shapes of decode steps that graphs are captured for, and which of them a step takes. Pure.

A shape is a number of sequences and a number of attention items: ranges of keys, into which each
sequence's context is cut. The longest context that a shape can take follows from its items; a batch
of one long context among short ones needs few.
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
        """Sequences that may have several items each, whose results are merged: none where there is
        one item for each."""
        return self.num_seqs if self.num_items > self.num_seqs else 0

    def holds(self, num_seqs: int, num_items: int) -> bool:
        """Whether such a step can be padded to this shape: by sequences of one item each. Where
        there is no room for merges there is none for a second item either."""
        num_idle = self.num_seqs - num_seqs
        return num_idle >= 0 and num_items + num_idle <= self.num_items


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Powers of two, from 16 on with one in the middle between them, and `largest`, in ascending
    order: at most half of the rows, and from 16 on a third of them, are padding."""
    sizes = chain((1, 2, 4, 8), chain.from_iterable((1 << n, 3 << (n - 1)) for n in count(4)))
    return (*takewhile(lambda size: size < largest, sizes), largest)


def step_shapes(
    largest_batch: int, items_per_seq: int, max_items: int | None = None
) -> tuple[StepShape, ...]:
    """All shapes, in ascending order: for each batch size 1, 2, 4, ... times as many items, up to
    items_per_seq times as many, but not more than max_items, which is at least largest_batch.

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
    """The first of ascending `shapes` that such a step can be padded to, or none."""
    return next((s for s in shapes if s.holds(num_seqs, num_items)), None)
