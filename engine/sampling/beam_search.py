"""Beam search with the results of transformers' generate(num_beams=...), one step at a time. Pure:
tokens and log probabilities in.

At each step every running beam offers its likeliest next tokens. The extensions of all beams are
ranked by the sum of their log probabilities:
- an extension that ends the output is finished if it is among the best `width`, with the score sum
  / length ** length_penalty; the best `width` finished outputs are kept;
- the best `width` extensions that do not end continue.

The search is over when every extension ended (max_tokens), or when there are `width` finished
outputs and, by early_stopping:
- ALWAYS: at once;
- HEURISTIC: the best running beam, scored at its present length, does not beat the worst finished
  output;
- NEVER: the best running beam cannot beat it at any length: it is scored at max_tokens for a
  positive length_penalty, else at its present length.

If fewer tokens are allowed than a step needs, fewer beams run and fewer outputs may be found.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.types import BeamParams, EarlyStopping, FinishReason, Sampling, finish_reason

#: (token id, log probability given the beam), likeliest first.
Candidates = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output. score: its tokens' summed log probability / length ** length_penalty."""

    token_ids: tuple[int, ...]
    score: float
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The next running beams, best first: beam i extends the previous beam parents[i] by
    token_ids[i].

    Both are empty when the search is over.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    is_over: bool


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class _Extension:
    parent: int
    token_id: int
    logprob: float
    finish: FinishReason


def beam_params(sampling: Sampling) -> BeamParams:
    """Beam search parameters of `sampling`. Raises ValueError if it has none."""
    if sampling.beam is None:
        raise ValueError("the sampling has no beam search")
    return sampling.beam


def num_candidates(sampling: Sampling) -> int:
    """Next tokens that a beam must offer: enough to contain `width` that do not end the output."""
    return beam_params(sampling).width + len(sampling.stop_token_ids)


class BeamSearch:
    """The beams of one sequence; initially one empty beam after the prompt."""

    def __init__(self, sampling: Sampling, num_prompt_tokens: int, max_model_len: int) -> None:
        """Raises ValueError if `sampling` has no beam search."""
        self._params = beam_params(sampling)
        self._sampling = sampling
        self._num_prompt_tokens = num_prompt_tokens
        self._max_model_len = max_model_len
        self._running: tuple[_Beam, ...] = (_Beam((), 0.0),)
        self._finished: tuple[Hypothesis, ...] = ()

    @property
    def num_running(self) -> int:
        """Running beams, each needing candidates in the next step; 0 once the search is over."""
        return len(self._running)

    def step(self, candidates: Sequence[Candidates]) -> BeamStep:
        """Extend the beams by one token. candidates[i]: the `num_candidates` likeliest allowed
        tokens after running beam i, or fewer if fewer are allowed."""
        survivors: list[_Extension] = []
        ended: list[_Extension] = []
        width = self._params.width
        for place, extension in enumerate(self._extensions(candidates)):
            if extension.finish is FinishReason.NONE:
                survivors.append(extension)
            elif place < width:
                ended.append(extension)
            if len(survivors) == width:
                break
        self._finished = self._best_finished(ended)
        self._running = tuple(
            _Beam((*self._tokens_of(e), e.token_id), e.logprob) for e in survivors
        )
        if self._is_over():
            self._running = ()
            return BeamStep((), (), is_over=True)
        return BeamStep(
            tuple(e.parent for e in survivors), tuple(e.token_id for e in survivors), is_over=False
        )

    def best(self) -> tuple[Hypothesis, ...]:
        """Finished outputs, best first: at most num_returned."""
        return self._finished[: self._params.num_returned]

    def _extensions(self, candidates: Sequence[Candidates]) -> Iterator[_Extension]:
        """All one-token extensions of the running beams, likeliest first; ties by beam index."""
        per_beam = [
            [(beam.logprob + logprob, index, token_id) for token_id, logprob in offered]
            for index, (beam, offered) in enumerate(zip(self._running, candidates, strict=True))
        ]
        for logprob, parent, token_id in heapq.merge(*per_beam, key=lambda entry: -entry[0]):
            yield _Extension(parent, token_id, logprob, self._finish(token_id))

    def _finish(self, token_id: int) -> FinishReason:
        length = self._length + 1
        total = self._num_prompt_tokens + length
        return finish_reason(token_id, length, total, self._sampling, self._max_model_len)

    @property
    def _length(self) -> int:
        """Output tokens of each running beam."""
        return len(self._running[0].token_ids)

    def _tokens_of(self, extension: _Extension) -> tuple[int, ...]:
        return self._running[extension.parent].token_ids

    def _best_finished(self, ended: Sequence[_Extension]) -> tuple[Hypothesis, ...]:
        found = [
            Hypothesis(
                (*self._tokens_of(e), e.token_id),
                self._score(e.logprob, self._length + 1),
                e.finish,
            )
            for e in ended
        ]
        ranked = sorted((*self._finished, *found), key=lambda h: -h.score)
        return tuple(ranked[: self._params.width])

    def _score(self, logprob: float, length: int) -> float:
        return logprob / float(length**self._params.length_penalty)

    def _is_over(self) -> bool:
        if not self._running:
            return True
        if len(self._finished) < self._params.width:
            return False
        if self._params.early_stopping is EarlyStopping.ALWAYS:
            return True
        return self._score(self._running[0].logprob, self._hoped_length) <= self._finished[-1].score

    @property
    def _hoped_length(self) -> int:
        """The length at which `early_stopping` scores the best running beam."""
        if self._params.early_stopping is EarlyStopping.NEVER and self._params.length_penalty > 0:
            room = self._max_model_len - self._num_prompt_tokens
            return min(self._sampling.max_tokens, room)
        return self._length
