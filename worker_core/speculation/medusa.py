"""Drafts by Medusa heads: each says a token further on, all from the target's one state of the
position before the last token.

They have nothing of a sequence but that state, and draw with the target's keys. So a sequence is
drafted for from its second step on, wherever it comes to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.interface import SampleRow
from worker_core.speculation.draft_lengths import DraftCosts
from worker_core.speculation.head import States
from worker_core.speculation.interface import NO_PROPOSAL, NOTHING, DraftRequest, Estimate, Proposal

if TYPE_CHECKING:
    import torch


class Heads(Protocol):
    """See engine.torch.medusa_runner.MedusaRunner."""

    @property
    def num_heads(self) -> int: ...

    def draft(
        self,
        states: Sequence[torch.Tensor],
        rows: Sequence[Sequence[SampleRow]],
        num_tokens: int,
    ) -> tuple[tuple[tuple[int, ...], ...], ...] | None: ...


class MedusaProposer:
    """Implements Proposer."""

    def __init__(
        self,
        heads: Heads,
        states: States,
        clock: Callable[[], float],
        widths: Sequence[int] = (),
    ) -> None:
        """states: of the target's sequences, by the keys of requests. clock: in seconds. widths:
        tokens to propose for each place, as far as it is not one."""
        self._widths = widths
        self._heads, self._states, self._clock = heads, states, clock
        self._costs = DraftCosts()

    def estimate(self, requests: Sequence[DraftRequest]) -> list[Estimate]:
        """Where states are not kept, what they would make possible."""
        return [
            Estimate(min(request.max_num_drafts, self._heads.num_heads))
            if not self._states.is_kept or self._can_draft(request)
            else NOTHING
            for request in requests
        ]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if not self._states.is_kept:
            self._states.start()
            return [NO_PROPOSAL] * len(requests)
        start_s = self._clock()
        able = [request for request in requests if self._can_draft(request)]
        if not able:
            return [NO_PROPOSAL] * len(requests)
        longest = min(max(request.max_num_drafts for request in able), self._heads.num_heads)
        states = [self._states.take(r.key, r.token_ids)[1][-1:] for r in able]
        widest = max(self._widths[:longest], default=1)
        drafts = self._heads.draft(states, [_rows(request, longest) for request in able], widest)
        self._costs.observe(len(requests), longest, self._clock() - start_s)
        if drafts is None:
            return [NO_PROPOSAL] * len(requests)
        found = {
            request.key: self._proposal(own[: request.max_num_drafts])
            for request, own in zip(able, drafts, strict=True)
        }
        return [found.get(request.key, NO_PROPOSAL) for request in requests]

    def cost_s(self, num_sequences: int, num_drafts: int) -> float:
        return self._costs.seconds(num_sequences, num_drafts)

    def forget(self, key: Hashable) -> None:
        self._states.forget(key)

    def _proposal(self, places: Sequence[tuple[int, ...]]) -> Proposal:
        """places: of each, its tokens, the likeliest first."""
        others = [own[1:width] for own, width in zip(places, self._widths, strict=False)]
        return Proposal(tuple(own[0] for own in places), tuple(others))

    def _can_draft(self, request: DraftRequest) -> bool:
        return self._states.first(request.key, request.token_ids) is not None


def _rows(request: DraftRequest, num_drafts: int) -> list[SampleRow]:
    """Of each draft, that it is drawn with the key of its place. Those before it are drawn at the
    same time, so that penalties do not know of them."""
    sampling = request.draft_sampling
    return [
        SampleRow(
            0,
            sampling,
            request.token_ids,
            request.num_prompt_tokens,
            request.choice,
            num_undrawn_tokens=num_undrawn,
        )
        for num_undrawn in range(num_drafts)
    ]
