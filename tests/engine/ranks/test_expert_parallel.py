"""Ranks that have whole experts compute what one rank computes: to the bit with the native kernels,
within rounding without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton_kernels.cpu.library import library
from baton_kernels.layer import Experts
from engine.families.layers import describe_layers
from engine.families.read import read_config
from engine.ranks.expert_load import place_experts, read_loads, write_loads
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
    placed = place_experts(read_loads(None, config), 2)
    held = []
    for rank in range(2):
        layer = describe_layers(config, Shard(rank, 2, placed))[0]
        assert isinstance(layer.mlp, Experts)
        experts = layer.mlp.experts
        held.append([i for i, expert in enumerate(experts) if expert.gate_up.num_out])
        assert {experts[i].gate_up.num_out for i in held[-1]} == {80}
        assert {experts[i].down.num_out for i in held[-1]} == {64}
    assert held == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_experts_are_placed_by_the_load_of_the_last_run(
    tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path, file = make_tiny_model(tmp_path, "deepseek_v3"), tmp_path / "load.json"
    options = {"enable_expert_parallel": True, "expert_load_file": file}
    first = load_ranks(path, 2, **options)
    wanted = first.logits(batch_of(first))
    first.close()
    dense, loads = read_loads(file, read_config(path))
    num_tokens = batch_of(first).num_tokens
    assert (dense, sum(loads)) == ((), 3 * num_tokens)
    second = load_ranks(path, 2, **options)
    assert torch.equal(second.logits(batch_of(second)), wanted)
    (_, owners) = place_experts(((), loads), 2)
    sums = [sum(n for n, o in zip(loads, owners, strict=True) if o == rank) for rank in range(2)]
    assert abs(sums[0] - sums[1]) <= max(loads)


def test_a_run_without_tokens_keeps_the_load(tmp_path: Path, load_ranks: LoadRanks) -> None:
    path, file = make_tiny_model(tmp_path, "mixtral"), tmp_path / "load.json"
    loads = ((5, 4, 3, 2, 1, 0), (0, 1, 2, 3, 4, 5))
    write_loads(file, loads, {0: [0] * 6})
    load_ranks(path, 2, enable_expert_parallel=True, expert_load_file=file).close()
    assert read_loads(file, read_config(path)) == loads


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "expert_load_file=.*cannot be read"),
        ('{"tokens": [[1, -1]]}', "expert_load_file=.*cannot be read"),
        ('{"tokens": [[1, 1], [1, 1]]}', "is of a model with other experts; give another file"),
    ],
)
def test_a_file_that_is_no_load_of_the_model_is_refused(
    tmp_path: Path, text: str, told: str
) -> None:
    config, file = read_config(make_tiny_model(tmp_path, "mixtral")), tmp_path / "load.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_loads(file, config)
    with pytest.raises(ConfigError, match=r"expert_load_file=.*gone/load.json: is in no folder"):
        read_loads(tmp_path / "gone" / "load.json", config)


@given(
    st.integers(1, 4).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.integers(1, 8).flatmap(
                lambda each: st.lists(
                    st.integers(0, 99), min_size=each * size, max_size=each * size
                )
            ),
        )
    )
)
def test_each_rank_has_as_many_experts_and_a_fair_load(drawn: tuple[int, list[int]]) -> None:
    size, loads = drawn
    (owners,) = place_experts((tuple(loads),), size)
    assert {owners.count(rank) for rank in range(size)} == {len(loads) // size}
    sums = [sum(n for n, o in zip(loads, owners, strict=True) if o == r) for r in range(size)]
    assert max(sums) - min(sums) <= max(loads)


def test_experts_that_do_not_come_out_even_are_refused(
    tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, "mixtral", num_local_experts=6)
    told = r"tensor_parallel_size=4: num_experts=6 is no multiple of it; this model takes 1, 2$"
    with pytest.raises(ConfigError, match=told):
        load_ranks(path, 4, enable_expert_parallel=True)
