"""Beam searches and prompt log probabilities of any oracle engine of default shape; its tokens are
oracle_tokens'."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.types import Sampling, TokenLogprobs
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.oracle import FULL_LAYERS, REFERENCE_LEN, OracleLayers, undisturbed_oracle
from engine.sampling.beam_search import BeamSearch, Hypothesis


def oracle_beams(
    prompt: Sequence[int],
    sampling: Sampling,
    vocab_size: int,
    allowed: Callable[[Sequence[int]], bytes | None] | None = None,
    adapter: str = "",
    layers: OracleLayers = FULL_LAYERS,
) -> tuple[Hypothesis, ...]:
    """Hypotheses of an undisturbed beam search on any oracle engine of default shape. allowed: see
    oracle_tokens."""
    engine = undisturbed_oracle(vocab_size, layers)
    search = BeamSearch(sampling, len(prompt), REFERENCE_LEN)
    beams: list[list[int]] = [list(prompt)]
    while True:
        offered = []
        for token_ids in beams:
            mask = allowed(token_ids[len(prompt) :]) if allowed else None
            row = SampleRow(len(token_ids) - 1, sampling, token_ids, len(prompt), allowed=mask)
            part = SequenceSlice(token_ids, 0, [0], (row,), adapter=adapter)
            ((one,),) = engine.forward(Batch((part,)))
            offered.append(one.logprobs.top if one.logprobs else ())
        step = search.step(offered)
        if step.is_over:
            return search.best()
        pairs = zip(step.parents, step.token_ids, strict=True)
        beams = [[*beams[parent], token_id] for parent, token_id in pairs]


def oracle_prompt_logprobs(
    prompt: Sequence[int], sampling: Sampling, vocab_size: int, layers: OracleLayers = FULL_LAYERS
) -> tuple[TokenLogprobs, ...]:
    """Prompt log probabilities, from the second token on, of any oracle engine of default shape."""
    rows = tuple(
        SampleRow(i, sampling, prompt[: i + 1], len(prompt), scored_token_id=token_id)
        for i, token_id in enumerate(prompt[1:])
    )
    part = SequenceSlice(prompt, 0, [0], rows)
    (samples,) = undisturbed_oracle(vocab_size, layers).forward(Batch((part,)))
    return tuple(one.logprobs for one in samples if one.logprobs)
