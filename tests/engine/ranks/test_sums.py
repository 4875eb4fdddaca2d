"""Ranks that share sums: the tokens of transformers, the same bits over every backend, two
exchanges a layer, and a numerics class of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from baton.types import Sampling
from bench.counted_ranks import count_exchanges
from engine.families.layers import describe_layer
from engine.families.read import read_config
from engine.ranks.mesh import Degrees
from engine.shard import Shard
from tests.engine.ranks.conftest import LoadRanks
from tests.engine.ranks.test_ranks_same_as_one import PROMPTS, batch_of, packed_4
from tests.support.drive_engine import generate, token_ids
from tests.support.quantized_models import compressed, make_quantized
from tests.support.tiny_models import Family, make_tiny_model
from tests.support.transformers_greedy import greedy_outputs

#: Dense with biases, with a window beside full attention and norms after layers, with latents, and
#: mixtures: with biases in stacked tensors, and with shared experts.
MODELS: dict[Family, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "gemma2": {"sliding_window": 6},
    "deepseek_v2": {},
    "gpt_oss": {"sliding_window": 11},
    "qwen3_moe": {},
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_of_transformers(
    family: Family, tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, family, **MODELS[family])
    wanted = greedy_outputs(path, PROMPTS, 6)
    logits = {}
    for size, backend in ((2, "shm"), (2, "gloo"), (4, "shm"), (4, "gloo")):
        engine = load_ranks(
            path,
            size,
            dtype="float32",
            tensor_parallel_cut="sums",
            distributed_backend=backend,
        )
        assert token_ids(generate(engine, PROMPTS, Sampling(), 6)) == wanted
        logits[size, backend] = engine.logits(batch_of(engine))
        kernels = engine.spec.numerics.kernels.split(".")
        assert f"sums{size}" in kernels
        engine.close()
    for size in (2, 4):
        assert torch.equal(logits[size, "shm"], logits[size, "gloo"])


def test_whole_experts_are_summed_too(tmp_path: Path, load_ranks: LoadRanks) -> None:
    path = make_tiny_model(tmp_path, "deepseek_v3")
    one = load_ranks(path, 1)
    two = load_ranks(path, 2, tensor_parallel_cut="sums", enable_expert_parallel=True)
    wanted, logits = (engine.logits(batch_of(engine)) for engine in (one, two))
    assert (logits - wanted).norm() / wanted.norm() < 1e-5


def test_quantised_weights_are_cut_by_groups(tmp_path: Path, load_ranks: LoadRanks) -> None:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
    stored = compressed("pack-quantized", symmetric=True, **scheme)
    path, _ = make_quantized(tmp_path, packed_4, stored, intermediate_size=96)
    one, two, on_levels = (
        load_ranks(path, size, dtype=dtype, tensor_parallel_cut="sums")
        for size, dtype in ((1, "float32"), (2, "float32"), (2, "bfloat16"))
    )
    wanted = one.logits(batch_of(one))
    for engine, bound in ((two, 1e-5), (on_levels, 0.1)):
        logits = engine.logits(batch_of(engine))
        assert (logits - wanted).norm() / wanted.norm() < bound
    told = "tensor_parallel_size=4: .* intermediate_size=96 is no multiple .* 16 weights of a scale"
    with pytest.raises(ConfigError, match=told):
        load_ranks(path, 4, dtype="bfloat16", tensor_parallel_cut="sums")


def test_the_first_rank_alone_adds_the_bias(tmp_path: Path) -> None:
    config = read_config(make_tiny_model(tmp_path, "llama", attention_bias=True))
    first, second = (
        describe_layer(config, 0, Shard(rank, 2, cut="sums")).attention.output for rank in (0, 1)
    )
    assert (first.num_out, first.num_in) == (64, 32)
    assert [source.columns for source in first.sources] == [(range(32), 64)]
    assert (first.is_part, second.is_part) == (False, True)


@pytest.mark.parametrize(("cut", "num_of_layer"), [("outputs", 4), ("sums", 2)])
def test_exchanges_and_bytes_are_as_documented(
    cut: Any, num_of_layer: int, tmp_path: Path, load_ranks: LoadRanks
) -> None:
    """docs/parallelism.md has the formulas. One row, decoded by two ranks."""
    path = make_tiny_model(tmp_path, "llama")
    config = read_config(path)
    with count_exchanges() as counts:
        engine = load_ranks(path, 2, dtype="bfloat16", tensor_parallel_cut=cut)
        generate(engine, [[5]], Sampling(), 1)  # joins, and touches all
        counts.reset()
        generate(engine, [[5]], Sampling(), 1)
    hidden, q = config.hidden_size, config.num_heads * config.head_dim
    width = (q + 2 * hidden + config.intermediate_size) // 2 if cut == "outputs" else 2 * hidden
    layers = config.num_layers
    # One exchange for the embeddings, and one for a pair of float32, the best token.
    assert counts.num_exchanges == layers * num_of_layer + 2
    assert counts.num_bytes == 2 * layers * width + 2 * hidden + 8


def test_degrees_say_how_many_parts_a_sum_has() -> None:
    assert Degrees(4).num_summands == 1
    assert Degrees(4, cut="sums").num_summands == 4
    assert replace(Degrees(cut="sums"), pipeline=2).num_summands == 1
