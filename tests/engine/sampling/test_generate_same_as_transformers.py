"""Greedy outputs under everything that a request may demand of them are those of transformers'
generate, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.types import FinishReason, Sampling, finish_reason
from engine.torch.engine import TorchEngine
from tests.support.drive_engine import generate, token_ids

MakeModel = Callable[..., Path]
MakeEngine = Callable[..., TorchEngine]

VOCAB, NUM_TOKENS = 40, 20
MODEL: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": 1, "max_position_embeddings": 64}
PROMPT = (3, 17, 5, 22, 9, 17)
STOPS = frozenset({1, 7, 30, 31})

CASES = {
    "nothing": Sampling(),
    "penalty": Sampling(repetition_penalty=1.8),
    "reward": Sampling(repetition_penalty=0.8),
    "bias": Sampling(logit_bias={3: 4.0, 8: -6.0, 21: 2.5}),
    "bad words": Sampling(bad_words=(*((i,) for i in range(8, 36, 2)), (9, 3), (17, 5))),
    "min tokens": Sampling(stop_token_ids=STOPS, min_tokens=12),
    "everything": Sampling(
        repetition_penalty=1.3,
        logit_bias={1: 3.0, 30: 4.0, 5: 1.0},
        bad_words=((5,), (12, 5), (17, 3), (22,)),
        stop_token_ids=STOPS,
        min_tokens=9,
    ),
}


def theirs(path: Path, s: Sampling) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        repetition_penalty=s.repetition_penalty,
        sequence_bias=[[[token], bias] for token, bias in s.logit_bias.items()] or None,
        bad_words_ids=[list(word) for word in s.bad_words] or None,
        eos_token_id=sorted(s.stop_token_ids) or None,
        min_new_tokens=s.min_tokens or None,
        pad_token_id=0,
    )
    output: list[int] = out[0, len(PROMPT) :].tolist()
    return output


def up_to_its_end(tokens: list[int], s: Sampling) -> list[int]:
    for count, token in enumerate(tokens, start=1):
        if finish_reason(token, count, len(PROMPT) + count, s, 64) is FinishReason.STOP:
            return tokens[:count]
    return tokens


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_same_tokens(tiny_model: MakeModel, tiny_engine: MakeEngine, name: str, seed: int) -> None:
    sampling = CASES[name]
    engine = tiny_engine("llama", seed=seed, **MODEL)
    (ours,) = token_ids(generate(engine, [PROMPT], sampling, NUM_TOKENS))
    assert up_to_its_end(ours, sampling) == theirs(
        tiny_model("llama", seed=seed, **MODEL), sampling
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", sorted(set(CASES) - {"nothing"}))
def test_each_case_changes_something(tiny_engine: MakeEngine, name: str) -> None:
    """Else its equality would prove nothing."""
    changed = []
    for seed in range(3):
        engine = tiny_engine("llama", seed=seed, **MODEL)
        plain = Sampling(stop_token_ids=CASES[name].stop_token_ids)
        outputs = generate(engine, [PROMPT, PROMPT], [plain, CASES[name]], NUM_TOKENS)
        before, after = (up_to_its_end(tokens, plain) for tokens in token_ids(outputs))
        changed.append(before != after)
    assert any(changed)
