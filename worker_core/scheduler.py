"""Which sequences a step serves, and which are preempted for them. Pure: state in, plan out.

On a decode worker, decoding sequences come before prefilling ones, so that a prompt never delays
running outputs; on a prefill worker the order is reversed, and the first prompt is finished first.
Within each class sequences are ordered by rank (priority, then arrival). A sequence that needs a
block when none is left takes it from the worst-ranked sequence, if that one ranks below itself;
otherwise it waits and keeps its blocks. The best-ranked sequence therefore always advances, and
every sequence eventually becomes the best-ranked one: no livelock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from baton.types import Rank


class Schedulable(Protocol):
    """A schedulable unit that holds blocks and awaits no KV: a sequence, or the beams of one."""

    @property
    def rank(self) -> Rank: ...

    @property
    def is_prefilling(self) -> bool: ...

    @property
    def num_missing_tokens(self) -> int:
        """Tokens without computed KV."""
        ...

    @property
    def min_new_tokens(self) -> int:
        """Minimum tokens that a step may compute."""
        ...

    @property
    def num_exclusive_blocks(self) -> int:
        """Blocks freed by preempting it alone; a lower bound if it is preempted together with
        sequences that share blocks."""
        ...

    def num_blocks_to_write(self, num_new: int) -> int:
        """Blocks to allocate for `num_new` more tokens."""
        ...


SequenceT = TypeVar("SequenceT", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[SequenceT]):
    """grants: (sequence, new tokens) of the step. preempted: sequences to preempt before it."""

    grants: tuple[tuple[SequenceT, int], ...]
    preempted: tuple[SequenceT, ...]


#: Chunks of the waiting prompts for each concurrent launch of a pipeline. More chunks leave its
#: stages idle for a smaller part of the time at both ends of a prompt: with m chunks and p stages
#: for (p - 1) / (m + p - 1) of it.
_CHUNKS_PER_LAUNCH = 4
#: Minimum tokens of such a chunk: smaller ones read all weights for too few tokens.
_MIN_CHUNK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Budget:
    """Token budget of a step. num_prefill_tokens: limit for prefilling sequences beside decoding
    ones.

    prompts_first: prefilling sequences are served before decoding ones. num_decoding: limit of
    decoding sequences; None: all.
    """

    num_tokens: int
    num_prefill_tokens: int
    prompts_first: bool = False
    num_decoding: int | None = None

    def of_launch(self, num_launches: int, num_decoding: int, num_prompt_tokens: int) -> Budget:
        """The share of one of a pipeline's concurrent launches, which divide the budget.

        num_decoding: sequences that decode, also those in flight. num_prompt_tokens: of prompts
        being computed, computed tokens included, so that chunks are of equal size.
        """
        share = -(-self.num_tokens // num_launches)
        chunk = -(-num_prompt_tokens // (_CHUNKS_PER_LAUNCH * num_launches))
        most = min(self.num_prefill_tokens, share, max(chunk, _MIN_CHUNK_TOKENS))
        return replace(
            self,
            num_tokens=share,
            num_prefill_tokens=most,
            num_decoding=-(-num_decoding // num_launches),
        )


def plan_step(
    by_rank: Sequence[SequenceT], num_available_blocks: int, budget: Budget
) -> StepPlan[SequenceT]:
    """Plan one step over all runnable sequences, best rank first."""
    prefilling = [sequence for sequence in by_rank if sequence.is_prefilling]
    decoding = [s for s in by_rank if not s.is_prefilling] if prefilling else by_rank
    decoding = decoding[: budget.num_decoding]
    num_left = len(by_rank)  # by_rank[num_left:] are preempted
    grants: list[tuple[SequenceT, int]] = []
    num_left_tokens = budget.num_tokens
    kinds = [(decoding, budget.num_tokens), (prefilling, budget.num_prefill_tokens)]
    if budget.prompts_first:
        kinds.reverse()
    for served, most in kinds:
        num_tokens = min(num_left_tokens, most)
        num_left_tokens -= num_tokens
        for sequence in served:
            if num_left < len(by_rank) and sequence.rank >= by_rank[num_left].rank:
                continue
            num_missing = sequence.num_missing_tokens
            num_new = num_missing if num_missing < num_tokens else num_tokens
            if num_new < sequence.min_new_tokens:
                continue
            num_needed = sequence.num_blocks_to_write(num_new)
            while num_needed > num_available_blocks and by_rank[num_left - 1].rank > sequence.rank:
                num_left -= 1
                num_available_blocks += by_rank[num_left].num_exclusive_blocks
            if num_needed > num_available_blocks:
                continue
            num_available_blocks -= num_needed
            num_tokens -= num_new
            grants.append((sequence, num_new))
        num_left_tokens += num_tokens
    preempted = tuple(by_rank[num_left:])
    return StepPlan(tuple(_without(grants, preempted)), preempted)


def _without(
    grants: Sequence[tuple[SequenceT, int]], preempted: Sequence[SequenceT]
) -> Sequence[tuple[SequenceT, int]]:
    """Remove grants of preempted sequences: a prefilling sequence may take blocks from a
    worse-ranked one that was granted its step already."""
    if not preempted:
        return grants
    gone = {id(sequence) for sequence in preempted}
    return [grant for grant in grants if id(grant[0]) not in gone]
