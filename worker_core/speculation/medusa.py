"""Drafts by Medusa heads: each says a token further on, all from the target's one state of the
position before the last token.

They have nothing of a sequence but that state, and draw with the target's keys. So a sequence is
drafted for from its second step on, wherever it comes to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.interface import SampleRow
from worker_core.speculation.interface import NO_PROPOSAL, DraftRequest, Proposal
from worker_core.speculation.proposer import States, StatesProposer

if TYPE_CHECKING:
    import torch


class Heads(Protocol):
    """See engine.torch.medusa.MedusaHeads."""

    @property
    def num_heads(self) -> int: ...

    def draft(
        self,
        states: Sequence[torch.Tensor],
        rows: Sequence[Sequence[SampleRow]],
        num_tokens: int,
    ) -> tuple[tuple[tuple[int, ...], ...], ...] | None: ...


class MedusaProposer(StatesProposer):
    """Implements Proposer."""

    def __init__(
        self,
        heads: Heads,
        states: States,
        clock: Callable[[], float],
        widths: Sequence[int] = (),
    ) -> None:
        """See StatesProposer."""
        super().__init__(states, clock, widths, heads.num_heads)
        self._heads = heads

    def _draft(self, requests: Sequence[DraftRequest]) -> Mapping[Hashable, Proposal]:
        able = [request for request in requests if self._can_draft(request)]
        if not able:
            return {}
        longest = min(max(request.max_num_drafts for request in able), self._heads.num_heads)
        states = [self._states.take(r.key, r.token_ids)[1][-1:] for r in able]
        widest = max(self._widths[:longest], default=1)
        drafts = self._heads.draft(states, [_rows(request, longest) for request in able], widest)
        if drafts is None:
            return dict.fromkeys([request.key for request in able], NO_PROPOSAL)
        return {
            request.key: self._proposal(own[: request.max_num_drafts])
            for request, own in zip(able, drafts, strict=True)
        }

    def _proposal(self, places: Sequence[tuple[int, ...]]) -> Proposal:
        """places: of each, its tokens, the likeliest first."""
        others = [own[1:width] for own, width in zip(places, self._widths, strict=False)]
        return Proposal(tuple(own[0] for own in places), tuple(others))


def _rows(request: DraftRequest, num_drafts: int) -> list[SampleRow]:
    """One row for each draft, drawn with the key of its place. All are drawn at once, so penalties
    ignore the drafts before it."""
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
