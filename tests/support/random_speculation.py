"""Speculation that guesses wildly: right tokens, wrong ones and both mixed, of any number, whenever
it likes. Where a grammar holds the output, wrong ones are often such as it allows: a chain is cut
at others, and alternatives are looked at within it alone."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

from engine.oracle import FULL_LAYERS, OracleLayers, oracle_tokens
from tests.support.grammar_walks import allowed_after, ids_of
from worker_core.speculation.interface import DraftRequest, Proposal


class RandomSpeculation:
    """Implements Speculation for oracle engines of vocab_size tokens and those
    layers."""

    max_num_drafts = 6

    def __init__(
        self, seed: int, vocab_size: int = 1000, layers: OracleLayers = FULL_LAYERS
    ) -> None:
        self._rng = random.Random(seed)
        self._vocab_size, self._layers = vocab_size, layers
        self._outputs: dict[Hashable, list[int]] = {}

    def is_due(self, key: Hashable) -> bool:  # noqa: ARG002
        return self._rng.random() < 0.8

    def plan(
        self,
        requests: Sequence[DraftRequest],
        num_rows: int,  # noqa: ARG002
        max_num_drafts: int,
    ) -> list[Proposal]:
        planned = []
        for request in requests:
            most = min(request.max_num_drafts, max_num_drafts)
            drafts = self._guess(request)[: self._rng.randint(0, most)]
            alternatives = tuple(
                self._others(request, place, drafts) for place in range(len(drafts))
            )
            max_num_drafts -= len(drafts)
            planned.append(Proposal(drafts, alternatives))
        return planned

    def record(self, key: Hashable, token_ids: Sequence[int]) -> None:
        pass

    def on_step_end(self, num_rows: int, num_drafts: int) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        self._outputs.pop(key, None)

    def _guess(self, request: DraftRequest) -> tuple[int, ...]:
        start = len(request.token_ids) - request.num_prompt_tokens
        right = self._output(request)[start : start + request.max_num_drafts]
        share = self._rng.choice([0.0, 0.2, 1.0])
        return tuple(
            self._any(request, start + place)
            if place >= len(right) or self._rng.random() < share
            else right[place]
            for place in range(request.max_num_drafts)
        )

    def _others(self, request: DraftRequest, place: int, drafts: Sequence[int]) -> tuple[int, ...]:
        """Up to two other tokens for a place, the right one often among them."""
        start = len(request.token_ids) - request.num_prompt_tokens + place
        right = self._output(request)[start : start + 1]
        others = [self._any(request, start)]
        if self._rng.random() < 0.5:
            others = [*right, *others]
        return tuple(token for token in dict.fromkeys(others) if token != drafts[place])

    def _any(self, request: DraftRequest, place: int) -> int:
        """For a place of the output."""
        output, allowed = self._output(request), allowed_after(request.sampling)
        if allowed is None or place >= len(output) or self._rng.random() < 0.3:
            return self._rng.randrange(self._vocab_size)
        return self._rng.choice(ids_of(allowed(output[:place])))

    def _output(self, request: DraftRequest) -> list[int]:
        """What the request gets in the end."""
        if request.key not in self._outputs:
            prompt = request.token_ids[: request.num_prompt_tokens]
            self._outputs[request.key] = oracle_tokens(
                prompt,
                request.sampling,
                self._vocab_size,
                request.choice,
                allowed_after(request.sampling),
                layers=self._layers,
            )
        return self._outputs[request.key]
