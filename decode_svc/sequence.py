"""A sequence while a decode worker holds it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.cache.pool import BlockLease
from baton.engine.interface import SampleRow, SequenceSlice
from baton.types import SequenceSpec


class Stage(enum.Enum):
    """AWAITING_KV -> RUNNING -> gone, or RUNNING at once when the worker prefills by itself.

    ABANDONED: given up while its ticket may still be written to; its blocks wait for the ticket's last event.
    """

    AWAITING_KV = enum.auto()
    RUNNING = enum.auto()
    ABANDONED = enum.auto()


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """Owned by the engine loop. `stream` and `handle` say to whom its events go."""

    stream: int
    handle: int
    spec: SequenceSpec
    lease: BlockLease
    stage: Stage
    num_computed_tokens: int
    ticket_id: int | None = None
    token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.token_ids)

    @property
    def rank(self) -> tuple[int, int, str]:
        return self.spec.rank

    @property
    def num_missing_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_blocks(self) -> int:
        return len(self.lease.block_ids)

    @property
    def num_exclusive_blocks(self) -> int:
        return self.lease.num_exclusive_blocks

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.spec.prompt_token_ids)

    def next_slice(self, num_new: int) -> SequenceSlice:
        """The next `num_new` tokens; sampled from if they are the last ones known."""
        start = self.num_computed_tokens
        is_whole = start + num_new == len(self.token_ids)
        row = SampleRow(
            offset=num_new - 1,
            sampling=self.spec.sampling,
            token_ids=self.token_ids,
            num_prompt_tokens=len(self.spec.prompt_token_ids),
            choice=self.spec.choice,
        )
        return SequenceSlice(
            token_ids=self.token_ids[start : start + num_new],
            start=start,
            block_table=self.lease.block_ids,
            rows=(row,) if is_whole else (),
            num_prompt_tokens=len(self.spec.prompt_token_ids),
        )
