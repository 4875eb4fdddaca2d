"""Base classes of proposers: TimedProposer measures its drafting time; StatesProposer drafts from
the target's hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from worker_core.speculation.draft_lengths import DraftCosts
from worker_core.speculation.interface import NO_PROPOSAL, NOTHING, DraftRequest, Estimate, Proposal

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Job:
    """A request while drafts are made for it, one after the other. token_ids: the sequence's, with
    the drafts so far."""

    request: DraftRequest
    token_ids: list[int]

    @property
    def drafts(self) -> tuple[int, ...]:
        return tuple(self.token_ids[len(self.request.token_ids) :])

    @property
    def num_drafts(self) -> int:
        return len(self.token_ids) - len(self.request.token_ids)


class TimedProposer(ABC):
    """A Proposer that learns what drafting costs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: in seconds."""
        self._clock = clock
        self._costs = DraftCosts()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        start_s = self._clock()
        found = self._draft(requests)
        if found:
            longest = max(request.max_num_drafts for request in requests)
            self._costs.observe(len(requests), longest, self._clock() - start_s)
        return [found.get(request.key, NO_PROPOSAL) for request in requests]

    def cost_s(self, num_sequences: int, num_drafts: int) -> float:
        return self._costs.seconds(num_sequences, num_drafts)

    @abstractmethod
    def _draft(self, requests: Sequence[DraftRequest]) -> Mapping[Hashable, Proposal]:
        """By key, what was proposed for the requests that could be worked on; empty if none
        could, which says nothing about costs."""


class States(Protocol):
    """See engine.torch.hidden_states.HiddenStates."""

    @property
    def is_kept(self) -> bool: ...

    def start(self) -> None: ...

    def first(self, key: Hashable, token_ids: Sequence[int]) -> int | None: ...

    def take(self, key: Hashable, token_ids: Sequence[int]) -> tuple[int, torch.Tensor]: ...

    def forget(self, key: Hashable) -> None: ...


class StatesProposer(TimedProposer):
    """Drafts from the target's hidden states. The engine keeps them from the first request for
    drafts until none was made for a while."""

    def __init__(
        self,
        states: States,
        clock: Callable[[], float],
        widths: Sequence[int],
        max_num_drafts: int | None = None,
    ) -> None:
        """states: of the target's sequences, by the keys of requests. widths: number of
        tokens proposed at each draft place; 1 where not given. max_num_drafts: limit per request;
        None for no limit."""
        super().__init__(clock)
        self._states, self._widths, self._max_num_drafts = states, widths, max_num_drafts

    def estimate(self, requests: Sequence[DraftRequest]) -> list[Estimate]:
        """Where states are not kept, what they would make possible."""
        return [
            Estimate(min(request.max_num_drafts, self._max_num_drafts or request.max_num_drafts))
            if not self._states.is_kept or self._can_draft(request)
            else NOTHING
            for request in requests
        ]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if not self._states.is_kept:
            self._states.start()
            return [NO_PROPOSAL] * len(requests)
        return super().propose(requests)

    def forget(self, key: Hashable) -> None:
        self._states.forget(key)

    def _can_draft(self, request: DraftRequest) -> bool:
        """Whether the target's states that are needed are here."""
        return self._states.first(request.key, request.token_ids) is not None
