"""Greedy tokens and logits equal those of transformers' own models, in float32."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.types import Sampling
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.torch.engine import TorchEngine
from tests.support.drive_engine import generate, token_ids
from tests.support.engines import load_engine
from tests.support.transformers_greedy import greedy_output

MakeModel = Callable[..., Path]
MakeEngine = Callable[..., TorchEngine]

NUM_TOKENS = 12
PROMPT_LENGTHS = (1, 7, 45, 16, 70)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "mistral-gqa": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "mistral-window-of-two": ("mistral", {"sliding_window": 2, "num_key_value_heads": 4}),
    "mistral-mqa-tied-window": (
        "mistral",
        {"sliding_window": 20, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen2-gqa": ("qwen2", {}),
    "qwen2-mha-tied": ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2-mqa-upper-window": (
        "qwen2",
        {
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen2-dynamic": ("qwen2", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "qwen3-gqa-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-mha": ("qwen3", {"num_key_value_heads": 4}),
    "qwen3-mqa-biases": ("qwen3", {"num_key_value_heads": 1, "attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
}


#: One model for each kind of attention and of positions. `make test` compares tokens of the others
#: with the slow tests, and leaves the rest to .ci/run.
FEW = (
    "llama-gqa",
    "llama-llama3",
    "llama-dynamic",
    "mistral-window",
    "qwen2-mqa-upper-window",
    "qwen3-mqa-biases",
)


def params_of(mark: pytest.MarkDecorator) -> list[Any]:
    """All cases; those that are not among the few are marked so."""
    return [name if name in FEW else pytest.param(name, marks=mark) for name in CASES]


@pytest.fixture(params=params_of(pytest.mark.slow))
def case(request: pytest.FixtureRequest, tiny_model: MakeModel) -> Path:
    family, overrides = CASES[request.param]
    return tiny_model(family, **overrides)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@cache
def unused(path: Path, dtype: torch.dtype) -> Any:
    """Its copies are used: dynamic RoPE scaling remembers what a model has seen."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def reference(path: Path) -> Any:
    """A fresh model."""
    return deepcopy(unused(path, torch.float32))


def exact(path: Path) -> Any:
    """In float64, so that the difference is our rounding alone: transformers' own in float32 is as
    large."""
    return deepcopy(unused(path, torch.float64))


@cache
def expected(path: Path) -> list[list[int]]:
    return [greedy_output(reference(path), prompt, NUM_TOKENS) for prompt in prompts()]


@pytest.mark.few_cases(2)
def test_greedy_tokens_are_those_of_generate(case: Path) -> None:
    wanted = expected(case)
    for block_size, chunk_tokens in ((16, 1 << 20), (5, 7), (3, 33), (32, 1)):
        engine = load_engine(str(case), block_size=block_size, num_blocks=110)
        outputs = generate(engine, prompts(), Sampling(), NUM_TOKENS, chunk_tokens=chunk_tokens)
        assert token_ids(outputs) == wanted, (block_size, chunk_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("case", params_of(pytest.mark.long), indirect=True)
def test_a_sequence_alone_gives_the_same_tokens(case: Path) -> None:
    engine = load_engine(str(case), block_size=4, num_blocks=64)
    alone = [generate(engine, [p], Sampling(), NUM_TOKENS, chunk_tokens=20)[0] for p in prompts()]
    assert token_ids(alone) == expected(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", params_of(pytest.mark.long), indirect=True)
def test_logits_are_close_at_every_position(case: Path) -> None:
    engine = load_engine(str(case), block_size=8, num_blocks=64)
    for prompt in prompts():
        wanted = exact(case)(torch.tensor([prompt])).logits[0].float()
        for chunk_tokens in (1 << 20, 19):
            parts = []
            for start in range(0, len(prompt), chunk_tokens):
                new = tuple(prompt[start : start + chunk_tokens])
                rows = tuple(
                    SampleRow(i, Sampling(), prompt[: start + i + 1], len(prompt))
                    for i in range(len(new))
                )
                part = SequenceSlice(new, start, range(40), rows, len(prompt))
                parts.append(engine.logits(Batch((part,))))
            torch.testing.assert_close(torch.cat(parts), wanted.detach(), atol=1e-4, rtol=0)


def test_tiles_of_a_long_chunk_change_nothing(tiny_model: MakeModel) -> None:
    """A chunk longer than one attention tile, first from nothing, then over a cached prefix."""
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, 256, (700,), generator=generator).tolist()
    for window in (None, 300):
        path = tiny_model("mistral", sliding_window=window, max_position_embeddings=1024)
        engine = load_engine(str(path), block_size=16, num_blocks=48)
        wanted = reference(path)(torch.tensor([prompt])).logits[0, -1].detach()
        for cut in (0, 129):
            if cut:
                engine.logits(Batch((SequenceSlice(tuple(prompt[:cut]), 0, range(48)),)))
            rows = (SampleRow(len(prompt) - cut - 1, Sampling(), prompt, len(prompt)),)
            got = engine.logits(Batch((SequenceSlice(prompt[cut:], cut, range(48), rows),)))[0]
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_close_as_transformers_is_to_itself(
    tiny_model: MakeModel, dtype: str
) -> None:
    """In low precision no two implementations agree to the bit: ours may differ from exact
    arithmetic about as much as transformers' own does."""
    from transformers import AutoModelForCausalLM

    path = tiny_model("llama")
    engine = load_engine(str(path), dtype=dtype, block_size=8, num_blocks=16)
    prompt = prompts()[2]
    exact = reference(path)(torch.tensor([prompt])).logits[0, -1].detach()
    theirs_model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    theirs = theirs_model(torch.tensor([prompt])).logits[0, -1].detach().float()
    rows = (SampleRow(len(prompt) - 1, Sampling(), prompt, len(prompt)),)
    ours = engine.logits(Batch((SequenceSlice(prompt, 0, range(16), rows),)))[0]
    assert (ours - exact).norm() < 2 * (theirs - exact).norm() + 1e-3
