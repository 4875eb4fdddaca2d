"""Which sequences a decode step serves, and which must leave for them. Pure: state in, plan out.

Sequences that decode come before sequences that prefill here, so that a prompt never holds up running answers; within
each, by rank (priority, then arrival). A sequence that needs a block when none is left takes it from the worst-ranked
sequence, if that one ranks worse than itself; otherwise it waits with its blocks. So the best-ranked sequence always
goes on, and every sequence becomes the best-ranked one in the end: no livelock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """What the scheduler sees of a sequence that holds blocks and awaits no KV."""

    @property
    def rank(self) -> tuple[int, int, str]: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def num_missing_tokens(self) -> int:
        """Tokens known but not computed: 1 when decoding, more while prefilling."""
        ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_exclusive_blocks(self) -> int:
        """Blocks that would be available if the sequence left."""
        ...


SequenceT = TypeVar("SequenceT", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[SequenceT]):
    """grants: who computes how many new tokens. preempted: who leaves before the step."""

    grants: tuple[tuple[SequenceT, int], ...]
    preempted: tuple[SequenceT, ...]


def plan_step(
    sequences: Sequence[SequenceT],
    num_available_blocks: int,
    block_size: int,
    max_num_batched_tokens: int,
) -> StepPlan[SequenceT]:
    """Plan one step over `sequences`, in any order."""
    by_rank = sorted(sequences, key=lambda s: s.rank)
    by_service = sorted(by_rank, key=lambda s: s.num_missing_tokens > 1)
    num_left = len(by_rank)  # by_rank[num_left:] are preempted
    grants: list[tuple[SequenceT, int]] = []
    budget = max_num_batched_tokens
    for sequence in by_service:
        if budget == 0:
            break
        if num_left < len(by_rank) and sequence.rank >= by_rank[num_left].rank:
            continue
        num_new = min(sequence.num_missing_tokens, budget)
        num_needed = (
            -(-(sequence.num_computed_tokens + num_new) // block_size) - sequence.num_blocks
        )
        while num_needed > num_available_blocks and by_rank[num_left - 1].rank > sequence.rank:
            num_left -= 1
            num_available_blocks += by_rank[num_left].num_exclusive_blocks
        if num_needed > num_available_blocks:
            continue
        num_available_blocks -= max(0, num_needed)
        budget -= num_new
        grants.append((sequence, num_new))
    preempted = tuple(by_rank[num_left:])
    return StepPlan(tuple(_without(grants, preempted)), preempted)


def _without(
    grants: Sequence[tuple[SequenceT, int]], preempted: Sequence[SequenceT]
) -> list[tuple[SequenceT, int]]:
    """A prefilling sequence may take blocks from a worse-ranked one that was granted its step already."""
    gone = {id(sequence) for sequence in preempted}
    return [grant for grant in grants if id(grant[0]) not in gone]
