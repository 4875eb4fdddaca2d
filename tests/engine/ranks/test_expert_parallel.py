"""Ranks that have whole experts compute what one rank computes: to the bit with the native kernels,
within rounding without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from baton_kernels.cpu.library import library
from baton_kernels.layer import Experts
from engine.families.layers import describe_layers
from engine.families.read import read_config
from engine.shard import Shard
from tests.engine.ranks.conftest import LoadRanks
from tests.engine.ranks.test_ranks_same_as_one import batch_of, kv_of, packed_4
from tests.support.quantized_models import compressed, make_quantized
from tests.support.tiny_models import Family, make_tiny_model

#: Mixtures: with shared experts, with groups, with latents, with stacked tensors.
FAMILIES: tuple[Family, ...] = (
    *("mixtral", "qwen3_moe", "glm4_moe"),
    *("deepseek_v2", "deepseek_v3", "gpt_oss"),
)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_kv_are_those_of_one_rank(
    family: Family, dtype: str, tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, family)
    one = load_ranks(path, 1, dtype=dtype)
    two = load_ranks(path, 2, dtype=dtype, enable_expert_parallel=True)
    wanted, logits = (engine.logits(batch_of(engine)) for engine in (one, two))
    assert two.spec == replace(one.spec, max_num_launches=1)
    assert wanted.isfinite().all()
    if library() is not None:
        assert torch.equal(logits, wanted)
        assert kv_of(two) == kv_of(one)
    else:
        assert (logits - wanted).norm() / wanted.norm() < (1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize(
    ("size", "options"),
    [(4, {}), (2, {"distributed_backend": "gloo"}), (2, {"context_parallel_size": 2})],
)
def test_any_number_of_ranks_and_backend_will_do(
    size: int, options: dict[str, Any], tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, "qwen3_moe")
    one = load_ranks(path, 1)
    several = load_ranks(path, size, enable_expert_parallel=True, **options)
    wanted, logits = (engine.logits(batch_of(engine)) for engine in (one, several))
    assert torch.allclose(logits, wanted, rtol=0, atol=0 if library() is not None else 1e-4)


def test_quantised_experts_are_placed_too(tmp_path: Path, load_ranks: LoadRanks) -> None:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
    stored = compressed("pack-quantized", symmetric=True, **scheme)
    path, _ = make_quantized(
        tmp_path, packed_4, stored, family="qwen3_moe", moe_intermediate_size=48
    )
    one, two = (
        load_ranks(path, size, dtype="bfloat16", enable_expert_parallel=True) for size in (1, 2)
    )
    wanted, logits = (engine.logits(batch_of(engine)) for engine in (one, two))
    assert (logits - wanted).norm() / wanted.norm() < 0.02
    if library() is not None:
        assert torch.equal(logits, wanted)


def test_a_rank_has_half_of_the_experts(tmp_path: Path) -> None:
    config = read_config(make_tiny_model(tmp_path, "qwen3_moe"))
    held = []
    for rank in range(2):
        layer = describe_layers(config, Shard(rank, 2, has_whole_experts=True))[0]
        assert isinstance(layer.mlp, Experts)
        experts = layer.mlp.experts
        held.append([i for i, expert in enumerate(experts) if expert.gate_up.num_out])
        assert {experts[i].gate_up.num_out for i in held[-1]} == {80}
        assert {experts[i].down.num_out for i in held[-1]} == {64}
    assert held == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_experts_that_do_not_come_out_even_are_refused(
    tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, "mixtral", num_local_experts=6)
    told = r"tensor_parallel_size=4: num_experts=6 is no multiple of it; this model takes 1, 2$"
    with pytest.raises(ConfigError, match=told):
        load_ranks(path, 4, enable_expert_parallel=True)
