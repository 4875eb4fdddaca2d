"""A prompt while a prefill worker holds it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.cache.pool import BlockLease
from baton.engine.interface import SequenceSlice
from baton.engine.rows import first_rows, scored_rows
from baton.grammar import MatcherOrder
from baton.types import Rank, SequenceSpec, TokenLogprobs


class Stage(enum.Enum):
    """WAITING -> COMPUTING -> SENDING -> gone, perhaps with BORROWING after WAITING; any of them -> CLOSING -> gone.

    WAITING has no blocks. BORROWING waits for KV from the destination. SENDING is computed, and its blocks wait for the
    receiver's word. CLOSING was given up while the sender may still read its blocks, or a lender write them. Without a
    ticket there is only COMPUTING.
    """

    WAITING = enum.auto()
    BORROWING = enum.auto()
    COMPUTING = enum.auto()
    SENDING = enum.auto()
    CLOSING = enum.auto()


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """When a step computed a chunk of a prompt, in seconds of the engine loop's clock."""

    begin_s: float
    end_s: float
    num_tokens: int


@dataclass(slots=True, eq=False)
class PrefillJob:
    """Owned by the engine loop. Times are in seconds of its clock.

    order: for the matcher of the grammar; None without one.
    num_held_tokens: leading tokens that the destination holds already, so that they are not sent.
    num_sent_layers: layers of the last chunk that were given to the sender; a step that runs again skips them.
    borrow_ticket_id: while KV is on its way here. is_sent: the sender has had its last word.
    prompt_logprobs: of the prompt's tokens but the first, as far as it is computed, if they were asked for.
    """

    key: str
    spec: SequenceSpec
    has_ticket: bool
    num_held_tokens: int
    arrived_s: float
    order: MatcherOrder | None = None
    stage: Stage = Stage.WAITING
    lease: BlockLease | None = None
    started_s: float = 0.0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_borrowed_tokens: int = 0
    num_sent_layers: int = 0
    borrow_ticket_id: int | None = None
    is_sent: bool = False
    chunks: list[ChunkTime] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def rank(self) -> Rank:
        return self.spec.rank

    @property
    def num_missing_tokens(self) -> int:
        return self.spec.num_tokens - self.num_computed_tokens

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(self.lease.block_ids) if self.lease else ()

    def allowed_first(self) -> bytes | None:
        """Tokens that the grammar, if there is one, allows after the prompt. Raises EngineFault if there are none."""
        if self.order is None:
            return None
        matcher = self.order.matcher()
        matcher.advance_many(self.spec.output_token_ids)
        return matcher.allowed()

    def next_slice(self, num_new: int, allowed: bytes | None = None) -> SequenceSlice:
        """The next `num_new` tokens; sampled from, once for each choice, if they end the prompt.

        allowed: see SampleRow; needed if the prompt ends here.
        """
        token_ids = self.spec.token_ids
        start = self.num_computed_tokens
        is_last = start + num_new == len(token_ids)
        firsts = first_rows(self.spec, num_new - 1, token_ids, allowed) if is_last else ()
        return SequenceSlice(
            token_ids=token_ids[start : start + num_new],
            start=start,
            block_table=self.block_ids,
            rows=(*scored_rows(self.spec, start, num_new), *firsts),
            num_prompt_tokens=len(self.spec.prompt_token_ids),
        )
