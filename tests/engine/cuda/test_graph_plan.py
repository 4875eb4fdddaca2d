"""Which decode steps are captured as graphs, and the memory that the plan keeps for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from baton.errors import ConfigError
from baton_kernels.gpu.attention_plan import SPLIT_TOKENS
from baton_kernels.gpu.padded_plan import partial_bytes
from engine.cuda.graph_device import CalledGraphs, Graph
from engine.cuda.recorded_decoder import sizes_of
from engine.cuda.step_graphs import MAX_PARTIAL_BYTES, GraphPlan, plan_graphs
from engine.cuda.step_shapes import StepShape
from engine.families.config import ModelConfig
from engine.families.read import parse_config
from engine.memory_plan import MemoryPlan
from tests.support.engines import load_engine
from tests.support.memory_plan import plan_memory

LLAMA_8B = parse_config(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
)


def pool_of(config: ModelConfig) -> torch.Tensor:
    shape = (0, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim)
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def plan_of(config: ModelConfig, largest_batch: int, max_model_len: int) -> GraphPlan:
    sizes = sizes_of(config, torch.bfloat16)
    return plan_graphs(sizes, pool_of(config), torch.bfloat16, largest_batch, max_model_len)


def memory(available_bytes: int, graph_bytes: int) -> MemoryPlan:
    return plan_memory(
        LLAMA_8B,
        dtype="bfloat16",
        block_size=16,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        available_bytes=available_bytes,
        graph_bytes=graph_bytes,
    )


def test_shapes_reach_the_longest_context() -> None:
    plan = plan_of(LLAMA_8B, 8, 8192)
    assert plan.shapes[0] == StepShape(1, 1)
    assert plan.shapes[-1] == StepShape(8, 8 * 8192 // SPLIT_TOKENS)


def test_windows_bound_what_a_context_takes() -> None:
    config = replace(LLAMA_8B, windows=(1000,) * LLAMA_8B.num_layers)
    plan = plan_of(config, 8, 8192)
    assert plan.shapes[-1].num_items == 8 * 3
    mixed = replace(LLAMA_8B, windows=(1000, None) * (LLAMA_8B.num_layers // 2))
    assert plan_of(mixed, 8, 8192).shapes[-1].num_items == 128


def test_partial_results_are_bounded() -> None:
    pool = pool_of(LLAMA_8B)
    plan = plan_of(LLAMA_8B, 512, 131072)
    most = max(shape.num_items for shape in plan.shapes)
    one_part = partial_bytes(pool, plan.tile, LLAMA_8B.num_heads)
    assert most * one_part <= MAX_PARTIAL_BYTES
    assert plan.num_bytes > most * one_part
    # A sequence of any length, alone, is captured all the same.
    assert StepShape(1, 131072 // SPLIT_TOKENS) in plan.shapes


class FullDevice(CalledGraphs):
    """Has no memory for a graph."""

    def record(self, run: Callable[[], None]) -> Graph:  # noqa: ARG002
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_failed_capture_names_the_way_out(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"enforce_eager.*failed \(CUDA out of memory\)"):
        load_engine(str(tiny_model()), num_blocks=4, max_num_seqs=2, make_graphs=FullDevice)


def test_blocks_get_what_graphs_leave() -> None:
    available, graphs = 20 << 30, 1 << 30
    without, beside = memory(available, 0), memory(available, graphs)
    lost = without.kv_bytes - beside.kv_bytes
    assert abs(lost - graphs) < beside.block_bytes
    assert "CUDA graphs" in beside.render()
    assert "CUDA graphs" not in without.render()
