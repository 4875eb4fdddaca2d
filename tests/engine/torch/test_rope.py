"""Frequencies by length and tables by blocks, to the bit."""

from __future__ import annotations

import random

import pytest
import torch

from baton_kernels.rope import rope_tables
from engine.families.config import ModelConfig
from engine.families.read import parse_config
from engine.torch.rope import Rope, make_rope

CPU = torch.device("cpu")
ORIGINAL = 64


def model(head_dim: int = 64, longest: int = ORIGINAL, **rope: object) -> ModelConfig:
    return parse_config(
        {
            "model_type": "llama",
            "hidden_size": 2 * head_dim,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": longest,
            "rope_parameters": {"rope_theta": 1e4, **rope},
        }
    )


def one_set(config: ModelConfig, length: int) -> torch.Tensor:
    """As transformers computes the frequencies of one length: of a number, not of many."""
    longest, factor, dim = config.max_position_embeddings, config.rope.factor, config.rope_width
    exponent = torch.arange(0, dim, 2, dtype=torch.float) / dim
    stretch = factor * torch.tensor(length) / longest - (factor - 1)
    return 1.0 / ((config.rope.theta * stretch ** (dim / (dim - 2))) ** exponent)


def whole(rope: Rope, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_tables(torch.arange(end), rope.inv_freq, rope.scaling, dtype)


def step(rope: Rope, *spans: range, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    positions = torch.tensor([place for span in spans for place in span])
    ((cos, sin),) = rope.tables(positions, positions, spans, dtype)
    return [cos, sin]


@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_sets_of_many_lengths_have_the_bits_of_each_alone(head_dim: int) -> None:
    config = model(head_dim, rope_type="dynamic", factor=3.5)
    rope = make_rope(config, CPU)
    lengths = sorted(random.Random(head_dim).sample(range(ORIGINAL + 1, 1 << 20), 333))
    positions = torch.tensor(lengths) - 1
    ((cos, sin),) = rope.compute(positions, torch.tensor(lengths), torch.float32)
    for place, length in enumerate(lengths):
        places = torch.full((len(lengths),), length - 1)
        wanted = rope_tables(places, one_set(config, length)[None], 1.0, torch.float32)
        assert torch.equal(cos[place], wanted[0][place])
        assert torch.equal(sin[place], wanted[1][place])


@pytest.mark.parametrize("rope_type", ["dynamic", "dynamic_yarn"])
def test_up_to_the_limit_all_lengths_have_one_set(rope_type: str) -> None:
    rope = make_rope(model(rope_type=rope_type, factor=4.0), CPU)
    lengths = torch.arange(1, ORIGINAL + 1)
    ours = rope.compute(lengths - 1, lengths, torch.float32)[0]
    plain = make_rope(model(rope_type="default"), CPU).compute(lengths - 1, lengths, torch.float32)
    assert rope.limit == ORIGINAL
    for mine, theirs in zip(ours, plain[0], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mscale", [{}, {"mscale": 1.0, "mscale_all_dim": 0.7}])
def test_dynamic_yarn_is_yarn_with_the_factor_of_the_length(mscale: dict[str, float]) -> None:
    rope = make_rope(model(rope_type="dynamic_yarn", factor=64.0, **mscale), CPU)
    for length in (ORIGINAL + 1, 100, 128, 1000, 4096):
        yarn = make_rope(model(rope_type="yarn", factor=length / ORIGINAL, **mscale), CPU)
        positions = torch.arange(length)
        lengths = torch.full((length,), length)
        for ours, theirs in zip(
            rope.compute(positions, lengths, torch.float32)[0],
            yarn.compute(positions, positions, torch.float32)[0],
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3 * length / 4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [20, 128])
def test_blocks_have_the_bits_of_a_whole_table(head_dim: int, dtype: torch.dtype) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    rope = make_rope(model(head_dim, **yarn), CPU)
    wanted = whole(rope, 8192, dtype)
    for spans in ([range(7000, 7001)], [range(1000, 1100), range(3, 4)], [range(2040, 5000)]):
        places = [place for span in spans for place in span]
        for ours, table in zip(step(rope, *spans, dtype=dtype), wanted, strict=True):
            assert torch.equal(ours, table[places])


def test_a_step_computes_no_position_far_from_its_own() -> None:
    rope = make_rope(model(rope_type="default"), CPU)
    step(rope, range(1 << 20, (1 << 20) + 3))
    assert len(rope._filled) == 1


def test_another_type_begins_anew() -> None:
    rope = make_rope(model(rope_type="default"), CPU)
    step(rope, range(5))
    assert step(rope, range(5), dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    assert torch.equal(step(rope, range(5))[0], whole(rope, 1024, torch.float32)[0][:5])
