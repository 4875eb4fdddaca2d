"""A sequence while a decode worker holds it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.cache.pool import BlockCopy, BlockLease
from baton.engine.interface import SampleRow, SequenceSlice
from baton.engine.rows import first_rows, scored_rows
from baton.grammar import Matcher, MatcherOrder
from baton.types import Rank, SequenceSpec, TokenLogprobs
from decode_svc.speculation.token_prefix import TokenPrefix


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


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence's, to be verified. masks: SampleRow.allowed after the last token known, and after each
    of the drafts."""

    token_ids: tuple[int, ...]
    masks: tuple[bytes | None, ...]

    def first(self, num_drafts: int) -> Draft:
        """The first of them alone."""
        return Draft(self.token_ids[:num_drafts], self.masks[: num_drafts + 1])


NO_DRAFT = Draft((), (None,))


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
    offered_s: float = 0.0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    order: MatcherOrder | None = None
    """None without a grammar."""
    matcher: Matcher | None = None
    """Of the output up to the last step's token; None until the grammar has been followed, and without one."""
    token_ids: list[int] = field(init=False)
    choices: list[int] = field(init=False)
    key: str = field(init=False)
    """Names the sequence in this boot of the worker."""

    def __post_init__(self) -> None:
        self.key = f"{self.stream}/{self.handle}"
        self.token_ids = list(self.spec.token_ids)
        self.choices = list(range(self.spec.num_choices))

    @property
    def rank(self) -> Rank:
        return self.spec.rank

    @property
    def is_prefilling(self) -> bool:
        # Asked several times in a step: without a further call.
        return len(self.token_ids) - self.num_computed_tokens > 1

    @property
    def num_missing_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def min_new_tokens(self) -> int:
        return 1

    @property
    def leases(self) -> tuple[BlockLease, ...]:
        """What it holds now."""
        return () if self.stage is Stage.SWAPPED else (self.lease,)

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

    def follow_grammar(self) -> None:
        """Bring the matcher up to the last token, and find what may come next. Raises EngineFault if nothing may."""
        if self.order is None:
            return
        self.matcher = self.matcher or self.order.matcher()
        num_followed = len(self.spec.prompt_token_ids) + self.matcher.num_tokens
        self.matcher.advance_many(self.token_ids[num_followed:])
        self.matcher.allowed()

    def draft(self, proposed: tuple[int, ...]) -> Draft:
        """Those up to the first one that the grammar does not allow, or that ends the output."""
        if self.matcher is None:
            return Draft(proposed, (None,) * (len(proposed) + 1))
        masks = self.matcher.allowed_along(proposed)
        return Draft(proposed[: len(masks) - 1], masks)

    def slices(self, num_new: int, draft: Draft | None) -> tuple[SequenceSlice]:
        """One: the next `num_new` tokens, sampled from if they are the last ones known; then after each draft, too.

        What may come next has been found.
        """
        start = self.num_computed_tokens
        known = self.token_ids[start : start + num_new]
        is_whole = start + num_new == len(self.token_ids)
        draft = draft or (self.draft(()) if self.matcher else NO_DRAFT)
        firsts = (
            first_rows(self.spec, num_new - 1, self.token_ids, draft.masks[0]) if is_whole else ()
        )
        part = SequenceSlice(
            token_ids=(*known, *draft.token_ids),
            start=start,
            block_table=self.lease.block_ids,
            rows=(
                *scored_rows(self.spec, start, num_new),
                *firsts,
                *self._draft_rows(draft),
            ),
            num_prompt_tokens=len(self.spec.prompt_token_ids),
        )
        return (part,)

    def _draft_rows(self, draft: Draft) -> list[SampleRow]:
        """One row after each draft, in a slice whose first token is the last known one."""
        if not draft.token_ids:
            return []
        token_ids = [*self.token_ids, *draft.token_ids]
        num_known = len(self.token_ids)
        return [
            SampleRow(
                offset=num_drafts,
                sampling=self.spec.sampling,
                token_ids=TokenPrefix(token_ids, num_known + num_drafts),
                num_prompt_tokens=len(self.spec.prompt_token_ids),
                choice=self.spec.choice,
                allowed=mask,
            )
            for num_drafts, mask in enumerate(draft.masks[1:], start=1)
        ]
