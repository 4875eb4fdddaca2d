"""A sequence in a worker."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, overload

from baton.events import ChunkTime
from baton.types import Rank, SequenceSpec, TokenLogprobs, across_accounts
from engine.grammar import Matcher, MatcherFuture
from engine.interface import (
    FOLLOWING,
    SampleRow,
    SequenceSlice,
    first_rows,
    scored_rows,
    wants_prompt_logprobs,
)
from engine.kv.lease import BlockCopy, BlockLease
from engine.kv.tiers.fetch import Fetch
from engine.token_counts import TokenCounts
from worker_core.commands import Destination, SequenceKey
from worker_core.gap_rule import Pace


class Stage(enum.Enum):
    """Stages of a sequence in this worker.

        AWAITING_KV --> RUNNING <--> PAUSED <--> HANDING_OFF --> gone
          FETCHING ---->  |  ^                        ^
                          |  +--> COPYING <-> SWAPPED |
                          |                           |
                          +---------------------------+  with a destination, at its first tokens

    AWAITING_KV: all its KV arrives by a ticket.
    FETCHING: a prefix of it arrives from its destination, or from a tier of KV.
    RUNNING: from the start for a prompt that is computed here.
    COPYING: its KV is copied to or from host memory; it holds its blocks.
    SWAPPED: its KV is in host memory; it holds no blocks.
    CLOSING: ended or cancelled, from any stage, while a ticket, a launch or a copy may still write
    its blocks, or the sender or a copy read them; the last of these releases the blocks.
    """

    AWAITING_KV = enum.auto()
    FETCHING = enum.auto()
    RUNNING = enum.auto()
    PAUSED = enum.auto()
    HANDING_OFF = enum.auto()
    COPYING = enum.auto()
    SWAPPED = enum.auto()
    CLOSING = enum.auto()


@dataclass(slots=True)
class LocalPrefillProgress:
    """Progress of a local prefill until the first tokens. Times in seconds on the engine loop's
    clock.

    sent_ends: by layer, end of the tokens passed to the KV sender; recomputed tokens are not sent
    again.
    logprobs: of the prompt tokens computed so far, without the first; if requested.
    """

    arrived_s: float
    started_s: float
    num_cached_tokens: int
    num_fetched_tokens: int = 0
    sent_ends: dict[int, int] = field(default_factory=dict)
    chunks: list[ChunkTime] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Branch:
    """An alternative to a draft: a prefix of it, then a different token.

    mask: SampleRow.allowed after the last token.
    lease: blocks of the sequence and of this branch's KV; released by the owner of the draft.
    """

    token_ids: tuple[int, ...]
    mask: bytes | None
    lease: BlockLease


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed next tokens, to be verified. masks: SampleRow.allowed after the last known token,
    and after each draft. branches: pairwise different."""

    token_ids: tuple[int, ...]
    masks: tuple[bytes | None, ...]
    branches: tuple[Branch, ...] = ()

    @property
    def num_drafts(self) -> int:
        return len(self.token_ids) + len(self.branches)

    @property
    def num_rows(self) -> int:
        """Additional rows of a step. A branch recomputes the last known token and its shared
        prefix."""
        return len(self.token_ids) + sum(1 + len(branch.token_ids) for branch in self.branches)


NO_DRAFT = Draft((), (None,))


@dataclass(slots=True, eq=False)
class WorkerSequence:
    """A sequence, owned by the engine loop. Events are addressed by `stream` and `handle`.

    A sequence of several choices is one until its first tokens.
    choices: numbers of the choices that were not cancelled before the fork.
    prefill: None if the KV arrives by a ticket, and after the first tokens.
    destination: worker that it moves to after its first tokens; None if it stays.
    ticket_id: set while a ticket may write its blocks.
    is_sending: whether the KV sender may read its blocks.
    is_copying: whether the swap space's thread may read or write its blocks.
    token_ids, num_computed_tokens: as of the last collected launch. The scheduler's view and the
    next slice also include launches in flight.
    """

    min_new_tokens: ClassVar[int] = 1

    stream: int
    handle: int
    spec: SequenceSpec
    lease: BlockLease
    stage: Stage
    num_computed_tokens: int
    prefill: LocalPrefillProgress | None = None
    destination: Destination | None = None
    is_sending: bool = False
    is_copying: bool = False
    reporting_choice: int | None = None
    """The first choice that continues, for a sequence with a destination after its first tokens.
    Handoff events use its handle, since other choices may have ended."""
    ticket_id: int | None = None
    offered_s: float = 0.0
    num_overtaken: int = 0
    """Sequences that took blocks while this one waited for more; see late_blocks.py."""
    fetch: Fetch | None = None
    """Set while a tier of KV may write its blocks; cancelled before they are released."""
    matcher_future: MatcherFuture | None = None
    """None without a grammar."""
    matcher: Matcher | None = None
    """Grammar state after the output; None before `follow_grammar`, and without a grammar."""
    has_begun: bool = False
    """Whether it has sampled a token here."""
    begun_s: float = 0.0
    """Time of that token; with the number of tokens then, the origin of its pace."""
    num_begun_tokens: int = 0
    num_launched_tokens: int = 0
    """Tokens of launches in flight, which follow num_computed_tokens; their KV is being written."""
    drawing_row: int | None = None
    """Row of the last launch in flight that samples its next token; None if none does."""
    is_drawing_last: bool = False
    """Whether that token is certainly the last one here: it ends the output, or moves to the
    destination with the KV."""
    token_ids: list[int] = field(init=False)
    choices: list[int] = field(init=False)
    key: SequenceKey = field(init=False)
    """Identifies the sequence within this boot of the worker."""
    decodes_ahead: bool = field(init=False)
    """Whether its next slice may be launched before its first token is known, because only KV
    depends on that token."""
    width: int = field(init=False)
    """Batch places that it takes, including those of its future choices or beams here."""
    num_growing_places: int = field(init=False)
    """Batch places that allocate more blocks as outputs grow; 0 for a sequence with a
    destination."""
    rank: Rank = field(init=False)
    """Rank among all sequences of the worker. This and the next three are derived from the spec,
    and cached because each step reads them."""
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    """Prompt plus maximum output."""
    is_scored: bool = field(init=False)
    """Whether log probabilities of the prompt are requested."""
    _counts: TokenCounts | None = field(init=False, default=None)
    """Counts of token_ids as of the last slice; None without penalties."""

    def __post_init__(self) -> None:
        self.key = self.stream, self.handle
        self.token_ids = list(self.spec.token_ids)
        self.choices = list(range(self.spec.num_choices))
        self.width = 1 if self.destination else self.spec.width
        self.num_growing_places = 0 if self.destination else self.width
        self.rank = across_accounts(self.spec.rank)
        self.num_prompt_tokens = len(self.spec.prompt_token_ids)
        sampling = self.spec.sampling
        self.max_num_tokens = self.num_prompt_tokens + sampling.max_tokens
        if sampling.has_penalties:
            self._counts = TokenCounts(self.num_prompt_tokens)
        self.is_scored = wants_prompt_logprobs(self.spec)
        self.decodes_ahead = not (
            self.matcher_future
            or sampling.beam
            or sampling.has_penalties
            or sampling.bad_words
            or self.spec.num_choices > 1
            or self.is_scored
        )

    @property
    def runs_ahead(self) -> bool:
        """Whether its next slice may be launched while the previous one is computed: for prompts
        that leave after the first token, and for sequences that decode ahead."""
        return self.decodes_ahead or (self.is_leaving and not self.is_scored)

    @property
    def is_drawing(self) -> bool:
        """Whether a launch in flight samples its next token."""
        return self.drawing_row is not None

    @property
    def is_leaving(self) -> bool:
        """Whether it moves to its destination after its first tokens."""
        return self.destination is not None and not self.has_begun

    def begin(self, now_s: float) -> None:
        """Mark that it has sampled its first token here, which is in token_ids."""
        self.has_begun = True
        self.begun_s, self.num_begun_tokens = now_s, len(self.token_ids)

    def pace(self, now_s: float, tpot_s: float) -> Pace:
        """How far it is ahead of a mean gap of `tpot_s`, the token in flight included."""
        num_tokens = len(self.token_ids) + (self.drawing_row is not None)
        due_s = self.begun_s + tpot_s * (num_tokens + 1 - self.num_begun_tokens)
        return Pace(due_s - now_s, self.max_num_tokens - num_tokens, tpot_s)

    @property
    def is_prefilling(self) -> bool:
        # Inlined num_missing_tokens: read several times per step.
        num_tokens = len(self.token_ids) + (self.drawing_row is not None)
        return num_tokens - self.num_computed_tokens - self.num_launched_tokens > 1

    @property
    def num_missing_tokens(self) -> int:
        num_tokens = len(self.token_ids) + (self.drawing_row is not None)
        return num_tokens - self.num_computed_tokens - self.num_launched_tokens

    @property
    def is_busy(self) -> bool:
        """Whether a ticket, a launch, a copy or the sender may still access its blocks."""
        return (
            self.is_sending
            or self.is_copying
            or self.ticket_id is not None
            or self.num_launched_tokens > 0
        )

    @property
    def leases(self) -> tuple[BlockLease, ...]:
        """The leases it holds now."""
        return () if self.stage is Stage.SWAPPED else (self.lease,)

    @property
    def num_exclusive_blocks(self) -> int:
        return self.lease.num_exclusive_blocks

    @property
    def next_position(self) -> int:
        """Position of the first token neither computed nor in flight."""
        return self.num_computed_tokens + self.num_launched_tokens

    def launched(self, num_new: int, drawing_row: int | None, max_model_len: int) -> None:
        """Mark the next `num_new` tokens as in flight. drawing_row: row of the launch that samples
        the next token, if any."""
        self.num_launched_tokens += num_new
        self.drawing_row = drawing_row
        most = min(self.max_num_tokens, max_model_len)
        is_last = self.is_leaving or self.next_position + 1 >= most
        self.is_drawing_last = drawing_row is not None and is_last

    def collected(self, num_new: int) -> None:
        """Remove the oldest `num_new` tokens from those in flight: their launch was collected."""
        self.num_launched_tokens -= num_new
        if not self.num_launched_tokens:
            self.drawing_row, self.is_drawing_last = None, False

    def num_blocks_to_write(self, num_new: int) -> int:
        start = self.next_position
        return self.lease.num_blocks_to_write(start, start + num_new)

    def prepare(self, num_new: int) -> tuple[BlockCopy, ...] | None:
        """Make room for the next `num_new` tokens; see BlockLease.prepare_write."""
        start = self.next_position
        return self.lease.prepare_write(start, start + num_new)

    def follow_grammar(self) -> None:
        """Advance the matcher to the last token and compute the allowed next tokens. Raises
        InvalidRequest if there are none."""
        if self.matcher_future is None:
            return
        self.matcher = self.matcher or self.matcher_future.matcher()
        num_followed = len(self.spec.prompt_token_ids) + self.matcher.num_tokens
        self.matcher.advance_many(self.token_ids[num_followed:])
        self.matcher.allowed()

    def draft(self, proposed: tuple[int, ...]) -> Draft:
        """Truncate a proposal before the first token that the grammar forbids or that ends the
        output."""
        if self.matcher is None:
            return Draft(proposed, (None,) * (len(proposed) + 1))
        masks = self.matcher.allowed_along(proposed)
        return Draft(proposed[: len(masks) - 1], masks)

    def slices(self, num_new: int, draft: Draft | None) -> tuple[SequenceSlice, ...]:
        """Slices of a step: one with the next `num_new` tokens and the draft, sampled after the
        last known token and after each draft; and one per branch, from the last known token,
        sampled at its end only.

        Requires `follow_grammar`.
        """
        start = self.next_position
        known = tuple(self.token_ids[start : start + num_new])
        num_undrawn = num_new - len(known)
        draft = draft or (self.draft(()) if self.matcher else NO_DRAFT)
        rows: tuple[SampleRow, ...] = ()
        if num_new == self.num_missing_tokens:
            mask = draft.masks[0]
            counts = self._counts.follow(self.token_ids) if self._counts else None
            rows = first_rows(self.spec, num_new - 1, self.token_ids, mask, num_undrawn, counts)
        if self.is_scored and not self.has_begun:
            rows = scored_rows(self.spec, start, num_new) + rows
        if draft.token_ids:
            known += draft.token_ids
            rows += tuple(
                SampleRow(
                    offset=num_drafts,
                    sampling=self.spec.sampling,
                    token_ids=self._with_drafts(draft.token_ids[:num_drafts]),
                    num_prompt_tokens=self.num_prompt_tokens,
                    choice=self.spec.choice,
                    allowed=mask,
                    counts=self._counts,
                )
                for num_drafts, mask in enumerate(draft.masks[1:], start=1)
            )
        part = SequenceSlice(
            FOLLOWING if num_undrawn else known,
            start,
            self.lease.block_ids,
            rows,
            self.num_prompt_tokens,
            self.drawing_row if num_undrawn else None,
            self.spec.adapter,
            self.key,
        )
        return (part, *(self._branch_slice(branch) for branch in draft.branches))

    def _with_drafts(self, drafts: Sequence[int]) -> DraftedTokens:
        return DraftedTokens(self.token_ids, len(self.token_ids), drafts)

    def _branch_slice(self, branch: Branch) -> SequenceSlice:
        num_drafts = len(branch.token_ids)
        row = SampleRow(
            offset=num_drafts,
            sampling=self.spec.sampling,
            token_ids=self._with_drafts(branch.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            choice=self.spec.choice,
            allowed=branch.mask,
            counts=self._counts,
        )
        return SequenceSlice(
            (self.token_ids[-1], *branch.token_ids),
            self.next_position,
            branch.lease.block_ids,
            (row,),
            self.num_prompt_tokens,
            None,
            self.spec.adapter,
            self.key,
        )


@dataclass(frozen=True, slots=True, eq=False)
class DraftedTokens(Sequence[int]):
    """View of the first `num_known` of `known`, then of `drafts`: a copy in each step would cost
    time by the length of the context. Known tokens may grow at their end meanwhile."""

    known: Sequence[int]
    num_known: int
    drafts: Sequence[int]

    def __len__(self) -> int:
        return self.num_known + len(self.drafts)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._at(places)
        if places.step != 1:
            return [self._at(place) for place in places]
        known = self.known[places.start : min(places.stop, self.num_known)]
        first, end = (max(0, place - self.num_known) for place in (places.start, places.stop))
        return [*known, *self.drafts[first:end]]

    def _at(self, place: int) -> int:
        behind = place - self.num_known
        return self.known[place] if behind < 0 else self.drafts[behind]
