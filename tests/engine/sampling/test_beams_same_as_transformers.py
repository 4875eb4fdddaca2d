"""Beam search over our engine finds the outputs and scores that transformers' generate finds, in
float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.types import BeamParams, EarlyStopping, FinishReason, Sampling
from engine.interface import Batch, Engine, SampleRow, SequenceSlice
from engine.sampling.beam_search import BeamSearch, Candidates, Hypothesis
from engine.torch.engine import TorchEngine
from tests.support.drive_engine import generate
from tests.support.transformers_beams import transformers_beams

MakeModel = Callable[..., Path]
MakeEngine = Callable[..., TorchEngine]

VOCAB = 40
MAX_LEN = 64
MODEL: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": 1, "max_position_embeddings": MAX_LEN}
PROMPT = (3, 17, 5, 22, 9)


def search(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> tuple[Hypothesis, ...]:
    """Beam search with all KV computed anew at each step."""
    beams = BeamSearch(sampling, len(prompt), engine.spec.max_model_len)
    tokens: list[tuple[int, ...]] = [tuple(prompt)]
    while True:
        step = beams.step(candidates(engine, tokens, sampling, len(prompt)))
        if step.is_over:
            return beams.best()
        extended = zip(step.parents, step.token_ids, strict=True)
        tokens = [(*tokens[parent], token_id) for parent, token_id in extended]


def candidates(
    engine: Engine, beams: Sequence[tuple[int, ...]], sampling: Sampling, num_prompt_tokens: int
) -> list[Candidates]:
    slices = []
    first_block = 0
    for token_ids in beams:
        count = engine.spec.layout.num_blocks_for(len(token_ids))
        table = range(first_block, first_block + count)
        row = SampleRow(len(token_ids) - 1, sampling, token_ids, num_prompt_tokens)
        slices.append(SequenceSlice(token_ids, 0, table, (row,), num_prompt_tokens))
        first_block += count
    samples = engine.forward(Batch(tuple(slices)))
    return [one.logprobs.top for (one,) in samples if one.logprobs is not None]


def beam_sampling(
    stops: frozenset[int] = frozenset({1}), max_tokens: int = 9, min_tokens: int = 0, **beam: Any
) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stops,
        beam=BeamParams(num_returned=beam["width"], **beam),
    )


#: Stop tokens are many, so that outputs end at many lengths.
STOPS = frozenset({1, 2, 4, 7, 11, 12, 13, 30})
CASES = {
    "two beams": beam_sampling(STOPS, width=2),
    "no stop token": beam_sampling(frozenset(), width=3),
    "short is good": beam_sampling(STOPS, width=4, length_penalty=-1.5),
    "length is nothing": beam_sampling(STOPS, width=4, length_penalty=0.0),
    "long is good": beam_sampling(STOPS, width=4, length_penalty=2.0),
    "at once": beam_sampling(STOPS, width=4, early_stopping=EarlyStopping.ALWAYS),
    "never": beam_sampling(STOPS, width=4, early_stopping=EarlyStopping.NEVER),
    "never, short": beam_sampling(
        STOPS, width=3, early_stopping=EarlyStopping.NEVER, length_penalty=-1.0
    ),
    "never, long": beam_sampling(
        STOPS, width=3, early_stopping=EarlyStopping.NEVER, length_penalty=3.0
    ),
    "not before": beam_sampling(STOPS, width=4, min_tokens=4),
    "one token": beam_sampling(STOPS, width=5, max_tokens=1),
    "wide": beam_sampling(STOPS, width=9, max_tokens=6),
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
@pytest.mark.parametrize("name", CASES)
def test_same_outputs_and_scores(
    tiny_model: MakeModel, tiny_engine: MakeEngine, name: str, seed: int
) -> None:
    sampling = CASES[name]
    ours = search(tiny_engine("llama", num_blocks=128, seed=seed, **MODEL), PROMPT, sampling)
    wanted = transformers_beams(tiny_model("llama", seed=seed, **MODEL), PROMPT, sampling)
    assert [list(h.token_ids) for h in ours] == [tokens for tokens, _ in wanted]
    scores = [score for _, score in wanted]
    assert [h.score for h in ours] == pytest.approx(scores, abs=1e-4, rel=1e-5)
    for hypothesis in ours:
        ends = hypothesis.token_ids[-1] in sampling.stop_token_ids
        assert hypothesis.finish is (FinishReason.STOP if ends else FinishReason.LENGTH)


def test_fewer_returned_are_the_best(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine("llama", num_blocks=128, seed=1, **MODEL)
    every = CASES["two beams"]
    assert every.beam is not None
    one = replace(every, beam=replace(every.beam, num_returned=1))
    assert search(engine, PROMPT, one) == search(engine, PROMPT, every)[:1]


def test_one_beam_is_greedy(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine("llama", num_blocks=128, seed=2, **MODEL)
    (found,) = search(engine, PROMPT, beam_sampling(frozenset(), width=1))
    greedy = Sampling(logprobs=0)
    (samples,) = generate(engine, [PROMPT], greedy, 9)
    assert list(found.token_ids) == [one.token_id for one in samples]
    total = sum(one.logprobs.logprob for one in samples if one.logprobs is not None)
    assert found.score == pytest.approx(total / 9, abs=1e-5)


def test_the_models_context_ends_a_search(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine("llama", num_blocks=128, **MODEL)
    prompt = tuple(i % VOCAB for i in range(MAX_LEN - 3))
    found = search(engine, prompt, beam_sampling(frozenset(), width=3, max_tokens=50))
    assert [len(h.token_ids) for h in found] == [3, 3, 3]
    assert {h.finish for h in found} == {FinishReason.LENGTH}
