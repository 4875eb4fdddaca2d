"""Sizes of models."""

from __future__ import annotations

import pytest

from engine.families.read import parse_config
from engine.memory_plan import num_parameters
from engine.plan.model import parts_of
from tests.support.planned import CONFIGS, LLAMA_8B, sizes_of


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_parts_are_all_parameters(name: str) -> None:
    sizes = sizes_of(CONFIGS[name])
    assert sizes.num_parameters == num_parameters(parse_config(CONFIGS[name]))
    parts = sum(weights.total for weights in parts_of(sizes).values())
    assert parts - (sizes.head.total if sizes.is_tied else 0) == sizes.num_parameters


def test_each_part_has_its_weights() -> None:
    parts = {name: weights.total for name, weights in parts_of(sizes_of(LLAMA_8B)).items()}
    assert parts == {
        "embeddings": 128_256 * 4096,
        "attention": 32 * 4096 * (2 * 4096 + 2 * 1024),
        "mlp": 32 * 3 * 4096 * 14_336,
        "norms, biases, routers": 65 * 4096,
        "output layer": 128_256 * 4096,
    }
    mixture = parts_of(sizes_of(CONFIGS["deepseek_v3"]))
    assert mixture["experts"].total == 3 * 8 * 3 * 64 * 32, "three of the four layers, eight each"
    assert mixture["mlp"].total == 3 * 64 * 128 + 3 * 3 * 64 * 32, "the dense layer, shared experts"


def test_levels_are_smaller_than_what_they_stand_for() -> None:
    plain, levels = sizes_of(CONFIGS["llama"]), sizes_of(CONFIGS["gptq"])
    mlp = levels.layers[0].mlp
    assert (mlp.plain, mlp.total) == (0, plain.layers[0].mlp.total)
    of_levels, of_plain = (s.storage.read_bytes(s.layers[0].mlp) for s in (levels, plain))
    assert of_levels == of_plain / 2 * (0.5 + 2 / 32), "half a byte and a 16-bit scale in 32"


def test_experts_that_are_read_grow_with_the_batch() -> None:
    sizes = sizes_of(CONFIGS["qwen3_moe"])
    shares = [sizes.expected_experts(tokens) for tokens in (0, 1, 2, 8, 64)]
    assert shares[:2] == [0.0, 0.25]
    assert shares == sorted(shares)
    assert shares[-1] < 1
