"""Drafts by prompt lookup: what followed the last tokens when they occurred before, in the prompt
or in the output.

A draft's grade is the length of the match: the longer, the surer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from worker_core.speculation.ngram_index import NgramIndex, continuation
from worker_core.speculation.proposer import NOTHING, DraftRequest, Forecast


class NgramProposer:
    """Implements Proposer. Costs microseconds a sequence: drafts come with the forecast."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        """min_tokens, max_tokens: shortest and longest n-gram that is looked up."""
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._indices: dict[Hashable, NgramIndex] = {}

    def foresee(self, requests: Sequence[DraftRequest]) -> list[Forecast]:
        return [self._foresee(request) for request in requests]

    def propose(self, requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._foresee(request).drafts for request in requests]

    def cost_s(self, num_sequences: int, num_drafts: int) -> float:  # noqa: ARG002
        return 0.0

    def forget(self, key: Hashable) -> None:
        self._indices.pop(key, None)

    def _foresee(self, request: DraftRequest) -> Forecast:
        index = self._indices.get(request.key)
        if index is None:
            index = self._indices[request.key] = NgramIndex(self._min_tokens, self._max_tokens)
        index.extend(request.token_ids)
        match = index.find(request.token_ids)
        if match is None:
            return NOTHING
        drafts = continuation(request.token_ids, match, request.max_num_drafts)
        return Forecast(len(drafts), match.num_tokens, drafts)
