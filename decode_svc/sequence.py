"""A sequence while a decode worker holds it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.cache.pool import BlockCopy, BlockLease
from baton.engine.interface import SampleRow, SequenceSlice
from baton.engine.rows import first_rows, scored_rows
from baton.types import Rank, SequenceSpec, TokenLogprobs


class Stage(enum.Enum):
    """Where a sequence is in its life here.

        AWAITING_KV --> RUNNING <--> PAUSED <--> MOVING --> gone
                         |    ^
                         v    |
                         SWAPPED

    A sequence that the worker prefills by itself is RUNNING at once. Any of them may end. SWAPPED holds no blocks.
    ABANDONED: given up while its ticket may still be written to, or its blocks read by the sender; its blocks wait for
    the last event of these.
    """

    AWAITING_KV = enum.auto()
    RUNNING = enum.auto()
    PAUSED = enum.auto()
    MOVING = enum.auto()
    SWAPPED = enum.auto()
    ABANDONED = enum.auto()


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """Owned by the engine loop. `stream` and `handle` say to whom its events go.

    A sequence of several choices is one until its first tokens; `choices` are those, counted from the first, that were
    not given up until then.
    """

    stream: int
    handle: int
    spec: SequenceSpec
    lease: BlockLease
    stage: Stage
    num_computed_tokens: int
    ticket_id: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(init=False)
    choices: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.token_ids)
        self.choices = list(range(self.spec.num_choices))

    @property
    def key(self) -> str:
        """Names the sequence in this boot of the worker."""
        return f"{self.stream}/{self.handle}"

    @property
    def rank(self) -> Rank:
        return self.spec.rank

    @property
    def is_prefilling(self) -> bool:
        return self.num_missing_tokens > 1

    @property
    def num_missing_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def min_new_tokens(self) -> int:
        return 1

    @property
    def num_exclusive_blocks(self) -> int:
        return self.lease.num_exclusive_blocks

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.spec.prompt_token_ids)

    def num_blocks_to_write(self, num_new: int) -> int:
        start = self.num_computed_tokens
        return self.lease.num_blocks_to_write(start, start + num_new)

    def prepare(self, num_new: int) -> tuple[BlockCopy, ...] | None:
        """Make room for the next `num_new` tokens: see BlockLease.prepare_write."""
        start = self.num_computed_tokens
        return self.lease.prepare_write(start, start + num_new)

    def slices(self, num_new: int) -> tuple[SequenceSlice]:
        return (self.next_slice(num_new),)

    def next_slice(self, num_new: int, drafts: Sequence[int] = ()) -> SequenceSlice:
        """The next `num_new` tokens, sampled from if they are the last ones known; then after each of `drafts`, too."""
        start = self.num_computed_tokens
        known = self.token_ids[start : start + num_new]
        is_whole = start + num_new == len(self.token_ids)
        firsts = first_rows(self.spec, num_new - 1, self.token_ids, None) if is_whole else ()
        return SequenceSlice(
            token_ids=(*known, *drafts),
            start=start,
            block_table=self.lease.block_ids,
            rows=(*scored_rows(self.spec, start, num_new), *firsts, *self._draft_rows(drafts)),
            num_prompt_tokens=len(self.spec.prompt_token_ids),
        )

    def _draft_rows(self, drafts: Sequence[int]) -> list[SampleRow]:
        """One row after each draft, in a slice whose first token is the last known one."""
        token_ids = [*self.token_ids, *drafts]
        num_known = len(self.token_ids)
        return [
            SampleRow(
                offset=num_drafts,
                sampling=self.spec.sampling,
                token_ids=token_ids[: num_known + num_drafts],
                num_prompt_tokens=len(self.spec.prompt_token_ids),
                choice=self.spec.choice,
            )
            for num_drafts in range(1, len(drafts) + 1)
        ]
