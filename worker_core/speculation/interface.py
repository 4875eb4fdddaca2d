"""Speculation: what the worker core asks for, and who proposes drafts. A draft changes when a token
is emitted, never which."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from baton.types import Sampling


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Asks for up to `max_num_drafts` tokens that may follow `token_ids`, the tokens of a sequence
    so far.

    key: the sequence's, the same in all requests; from one to the next, its token_ids only get
    longer.
    token_ids: borrowed for the call. Output follows the first num_prompt_tokens of them.
    sampling, choice: how the target draws, for proposers that draw likewise.
    """

    key: Hashable
    token_ids: Sequence[int]
    num_prompt_tokens: int
    max_num_drafts: int
    sampling: Sampling
    choice: int = 0

    @property
    def draft_sampling(self) -> Sampling:
        """How to draw, without what a draft has no use for."""
        return replace(self.sampling, logprobs=-1, prompt_logprobs=-1, grammar=b"")


class Proposal(NamedTuple):
    """Tokens that may follow a sequence's, one after the other. alternatives: other tokens for the
    place of each, all different, of which none is gone on from; of places beyond them none."""

    token_ids: tuple[int, ...] = ()
    alternatives: tuple[tuple[int, ...], ...] = ()

    def first(self, num_drafts: int) -> Proposal:
        """The first places of it."""
        return Proposal(self.token_ids[:num_drafts], self.alternatives[:num_drafts])


NO_PROPOSAL = Proposal()


def rows_of_places(widths: Sequence[int]) -> tuple[int, ...]:
    """Rows that a step has more for each place of a proposal, of which place i has widths[i] tokens
    to choose from: one for the draft itself, and for each alternative one for every token from the
    last known one on, which are computed again for it."""
    return tuple(1 + (width - 1) * (2 + place) for place, width in enumerate(widths))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a request may get. num_drafts: at most so many. confidence: how good the first draft
    seems to be; drafts of one confidence are expected to be right equally often. drafts: they
    themselves, of a proposer to which they cost next to nothing."""

    num_drafts: int
    confidence: int = 0
    drafts: tuple[int, ...] = ()


NOTHING = Estimate(0)


class Proposer(Protocol):
    """A way to guess. One thread, the engine loop's, uses it."""

    def estimate(self, requests: Sequence[DraftRequest]) -> list[Estimate]:
        """What each request may get. Cheap, for it is asked of requests that are not made in the
        end, too."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts of each request, at most as many as it asks for; none if there is nothing to guess
        from."""
        ...

    def cost_s(self, num_sequences: int, num_drafts: int) -> float:
        """Seconds that propose() takes for so many requests of at most `num_drafts` each; 0 if next
        to nothing."""
        ...

    def forget(self, key: Hashable) -> None:
        """The sequence is over. Unknown keys are ignored."""
        ...


class Speculation(Protocol):
    """Gives drafts for steps, and learns from the results. Used by the engine loop's thread
    only."""

    @property
    def max_num_drafts(self) -> int:
        """Maximum drafts of one sequence in one step."""
        ...

    def is_due(self, key: Hashable) -> bool:
        """Whether to ask for drafts of a sequence in this step; to be called once in each of its
        steps."""
        ...

    def plan(
        self, requests: Sequence[DraftRequest], num_rows: int, max_num_drafts: int
    ) -> list[Proposal]:
        """The drafts to verify, of each request, at most `max_num_drafts` rows in all, in a step
        that decodes `num_rows` tokens without them, of these sequences and perhaps others."""
        ...

    def record(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """What a sequence got in the step that was planned."""
        ...

    def on_step_end(self, num_rows: int, num_drafts: int) -> None:
        """The step that was planned is over; it computed so many tokens, and so many rows
        for drafts beside."""
        ...

    def forget(self, key: Hashable) -> None:
        """The sequence is over. Unknown keys are ignored."""
        ...
