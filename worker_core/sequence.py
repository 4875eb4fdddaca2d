"""A sequence while a worker holds it."""

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
from worker_core.commands import Destination, SequenceKey


class Stage(enum.Enum):
    """Where a sequence is in its life here.

        AWAITING_KV --> RUNNING <--> PAUSED <--> HANDING_OFF --> gone
          FETCHING ---->  |  ^                        ^
                          |  +--> SWAPPED             |
                          +---------------------------+  with a destination, at its first tokens

    AWAITING_KV: all its KV comes by a ticket. FETCHING: a prefix of it comes from its destination.
    A sequence whose prompt is computed here is RUNNING at once. SWAPPED holds no blocks. Any of
    them may end. CLOSING: given up, or over, while a ticket or a launch may still write to its
    blocks, or the sender read them; its blocks wait for the last of these.
    """

    AWAITING_KV = enum.auto()
    FETCHING = enum.auto()
    RUNNING = enum.auto()
    PAUSED = enum.auto()
    HANDING_OFF = enum.auto()
    SWAPPED = enum.auto()
    CLOSING = enum.auto()


@dataclass(slots=True)
class LocalPrefillProgress:
    """How the prompt of a sequence is computed here, until its first tokens. Times in seconds of
    the engine loop's clock.

    sent_ends: by layer, the token up to which its KV was given to the KV sender; what is computed
    again is not sent again.
    logprobs: of the prompt's tokens but the first, as far as it is computed, if they were asked
    for.
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
    """Tokens that may follow a sequence's in place of its drafts: some of these, and then another
    one. mask: SampleRow.allowed after the last. lease: of the blocks that their KV is written to,
    and the sequence's before them; whoever has the draft releases it."""

    token_ids: tuple[int, ...]
    mask: bytes | None
    lease: BlockLease


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence's, to be verified. masks: SampleRow.allowed after the last
    token known, and after each of the drafts. branches: all different."""

    token_ids: tuple[int, ...]
    masks: tuple[bytes | None, ...]
    branches: tuple[Branch, ...] = ()

    @property
    def num_drafts(self) -> int:
        return len(self.token_ids) + len(self.branches)

    @property
    def num_rows(self) -> int:
        """That a step has more for them: a branch computes the last token known, and what it shares
        with others, again."""
        return len(self.token_ids) + sum(1 + len(branch.token_ids) for branch in self.branches)


NO_DRAFT = Draft((), (None,))


@dataclass(slots=True, eq=False)
class WorkerSequence:
    """Owned by the engine loop. `stream` and `handle` say to whom its events go.

    A sequence of several choices is one until its first tokens; `choices` are those, counted from
    the first, that were not given up until then.
    prefill: None where the KV comes by a ticket, and from the first tokens on.
    destination: where it goes after its first tokens; None if it stays.
    ticket_id: while its blocks may be written by a ticket. is_sending: while the KV sender may read
    them. token_ids and num_computed_tokens are what is known, whatever is in flight: what was
    launched counts from when it is collected. What the scheduler sees, and the next slice, are as
    they will be then.
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
    reporting_choice: int | None = None
    """Of a sequence with a destination, once it has its first tokens: the first choice that goes
    on. What becomes of the handoff is reported under its handle, for the others' may have ended."""
    ticket_id: int | None = None
    offered_s: float = 0.0
    matcher_future: MatcherFuture | None = None
    """None without a grammar."""
    matcher: Matcher | None = None
    """Of the output up to the last step's token; None until the grammar has been followed, and
    without one."""
    has_begun: bool = False
    """Whether it has got tokens here."""
    num_launched_tokens: int = 0
    """Of launches that are not collected: their KV is being written, after num_computed_tokens."""
    drawing_row: int | None = None
    """The row of the last launch, not collected, that draws its next token; None if none does."""
    is_drawing_last: bool = False
    """Whether nothing follows that token here, whatever it is: it ends the output, or goes to the
    destination with the KV."""
    token_ids: list[int] = field(init=False)
    choices: list[int] = field(init=False)
    key: SequenceKey = field(init=False)
    """Names the sequence in this boot of the worker."""
    decodes_ahead: bool = field(init=False)
    """Whether its next slice may be launched without knowing the token that it begins with: nothing
    but KV depends on it."""
    width: int = field(init=False)
    """Places in the batch that it takes, or its choices or beams will take here."""
    num_growing_places: int = field(init=False)
    """Those of them that take further blocks as outputs grow: none of a sequence that leaves."""
    rank: Rank = field(init=False)
    """Among all of the worker. Of its spec, as the next three are: asked for in each step, and then
    from here."""
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    """Of the prompt and the longest output."""
    is_scored: bool = field(init=False)
    """Whether log probabilities of its prompt are wanted."""

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
        """Whether its next slice may be launched while the one before is computed: its tokens are
        those of a prompt that leaves after its first token, or may be unknown."""
        return self.decodes_ahead or (self.is_leaving and not self.is_scored)

    @property
    def is_leaving(self) -> bool:
        """Whether it goes to its destination as soon as its first tokens are drawn."""
        return self.destination is not None and not self.has_begun

    @property
    def is_prefilling(self) -> bool:
        # Asked several times in a step: without a further call.
        num_tokens = len(self.token_ids) + (self.drawing_row is not None)
        return num_tokens - self.num_computed_tokens - self.num_launched_tokens > 1

    @property
    def num_missing_tokens(self) -> int:
        num_tokens = len(self.token_ids) + (self.drawing_row is not None)
        return num_tokens - self.num_computed_tokens - self.num_launched_tokens

    @property
    def is_busy(self) -> bool:
        """Whether somebody may still write to its blocks, or read them, whatever becomes of it."""
        return self.is_sending or self.ticket_id is not None or self.num_launched_tokens > 0

    @property
    def leases(self) -> tuple[BlockLease, ...]:
        """What it holds now."""
        return () if self.stage is Stage.SWAPPED else (self.lease,)

    @property
    def num_exclusive_blocks(self) -> int:
        return self.lease.num_exclusive_blocks

    @property
    def next_position(self) -> int:
        """Of the first token that is not computed and not launched."""
        return self.num_computed_tokens + self.num_launched_tokens

    def launched(self, num_new: int, drawing_row: int | None, max_model_len: int) -> None:
        """The next `num_new` tokens are in flight. drawing_row: of the launch, if it draws the
        sequence's next token."""
        self.num_launched_tokens += num_new
        self.drawing_row = drawing_row
        most = min(self.max_num_tokens, max_model_len)
        is_last = self.is_leaving or self.next_position + 1 >= most
        self.is_drawing_last = drawing_row is not None and is_last

    def collected(self, num_new: int) -> None:
        """The oldest `num_new` tokens in flight are so no longer."""
        self.num_launched_tokens -= num_new
        if not self.num_launched_tokens:
            self.drawing_row, self.is_drawing_last = None, False

    def num_blocks_to_write(self, num_new: int) -> int:
        start = self.next_position
        return self.lease.num_blocks_to_write(start, start + num_new)

    def prepare(self, num_new: int) -> tuple[BlockCopy, ...] | None:
        """Make room for the next `num_new` tokens: see BlockLease.prepare_write."""
        start = self.next_position
        return self.lease.prepare_write(start, start + num_new)

    def follow_grammar(self) -> None:
        """Bring the matcher up to the last token, and find what may come next. Raises
        InvalidRequest if nothing may."""
        if self.matcher_future is None:
            return
        self.matcher = self.matcher or self.matcher_future.matcher()
        num_followed = len(self.spec.prompt_token_ids) + self.matcher.num_tokens
        self.matcher.advance_many(self.token_ids[num_followed:])
        self.matcher.allowed()

    def draft(self, proposed: tuple[int, ...]) -> Draft:
        """Those up to the first one that the grammar does not allow, or that ends the output."""
        if self.matcher is None:
            return Draft(proposed, (None,) * (len(proposed) + 1))
        masks = self.matcher.allowed_along(proposed)
        return Draft(proposed[: len(masks) - 1], masks)

    def slices(self, num_new: int, draft: Draft | None) -> tuple[SequenceSlice, ...]:
        """The next `num_new` tokens, sampled from if they are the last ones known; then after each
        draft, too. Of a draft's branches one each, with the last token known, sampled from at the
        end alone.

        What may come next has been found.
        """
        start = self.next_position
        known = tuple(self.token_ids[start : start + num_new])
        num_undrawn = num_new - len(known)
        draft = draft or (self.draft(()) if self.matcher else NO_DRAFT)
        rows: tuple[SampleRow, ...] = ()
        if num_new == self.num_missing_tokens:
            mask = draft.masks[0]
            rows = first_rows(self.spec, num_new - 1, self.token_ids, mask, num_undrawn)
        if self.is_scored and not self.has_begun:
            rows = scored_rows(self.spec, start, num_new) + rows
        if draft.token_ids:
            known += draft.token_ids
            token_ids, num_known = [*self.token_ids, *draft.token_ids], len(self.token_ids)
            rows += tuple(
                SampleRow(
                    offset=num_drafts,
                    sampling=self.spec.sampling,
                    token_ids=TokenPrefix(token_ids, num_known + num_drafts),
                    num_prompt_tokens=self.num_prompt_tokens,
                    choice=self.spec.choice,
                    allowed=mask,
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

    def _branch_slice(self, branch: Branch) -> SequenceSlice:
        num_drafts = len(branch.token_ids)
        row = SampleRow(
            offset=num_drafts,
            sampling=self.spec.sampling,
            token_ids=[*self.token_ids, *branch.token_ids],
            num_prompt_tokens=self.num_prompt_tokens,
            choice=self.spec.choice,
            allowed=branch.mask,
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
class TokenPrefix(Sequence[int]):
    """The first `num_tokens` of `token_ids`, which must not change while this is in use."""

    token_ids: Sequence[int]
    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        places = range(self.num_tokens)[index]
        if isinstance(places, int):
            return self.token_ids[places]
        if places.step == 1:
            return self.token_ids[places.start : places.stop]
        return [self.token_ids[place] for place in places]
