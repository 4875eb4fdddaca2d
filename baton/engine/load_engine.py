"""An engine from a checkpoint: what is asked for is checked, memory is planned, then parameters are
read and the KV pool is made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from baton.engine.dtype import choose_dtype
from baton.engine.graph_device import GraphDevice
from baton.engine.interface import EngineSpec
from baton.engine.numerics import numerics_of
from baton.engine.step_runner import EagerSteps, StepModel, StepRunner
from baton.engine.tensor_parallel.start import check_ranks, start_followers
from baton.engine.torch_engine import TorchEngine
from baton.errors import ConfigError
from baton.model.checkpoint import find_shards, naming_model, resolve_checkpoint
from baton.model.config import DTYPES, ModelConfig, read_config
from baton.model.host_memory import available_memory_bytes
from baton.model.load import keeps_stored_levels, load_parameters
from baton.model.memory_plan import MemoryPlan, plan_memory
from baton.model.native_decoder import make_decoder
from baton.model.rope import make_rope
from baton.model.weights import ProgressHook
from baton.start_log import report_phase
from baton.types import FALLBACK_NOTICE, SCALE_BYTES, SCALED_DTYPES, KvLayout
from baton_kernels.cpu.library import why_none

if TYPE_CHECKING:
    from baton.engine.step_graphs import GraphPlan, ReplayedSteps

_log = logging.getLogger(__name__)


def load_engine(
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    block_size: int = 16,
    kv_cache_memory_bytes: int | None = None,
    memory_share: float = 0.8,
    num_blocks: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    layer_group_size: int = 4,
    served_model_name: str | None = None,
    num_threads: int | None = None,
    tensor_parallel_size: int = 1,
    make_graphs: Callable[[torch.device], GraphDevice] | None = None,
    max_graph_seqs: int | None = None,
    on_plan: Callable[[MemoryPlan], None] | None = None,
    progress: ProgressHook | None = None,
) -> TorchEngine:
    """Load the checkpoint `model` (a folder or a hub id) and make its KV pool.

    `on_plan` sees the memory plan before anything is loaded; by default it is logged. `progress`
    sees each tensor read; by default there is a bar on a terminal. make_graphs: what records decode
    steps, of up to max_graph_seqs sequences; if not given, all steps run eagerly. It needs Triton's
    kernels. max_graph_seqs: max_num_seqs, if not given. Raises ConfigError and ModelError (see
    baton.errors).
    """
    size = tensor_parallel_size
    if num_threads is not None or size > 1:
        torch.set_num_threads(max(1, (num_threads or torch.get_num_threads()) // size))
    where = _device(device)
    with naming_model(model):
        folder = resolve_checkpoint(model, revision)
        config = read_config(folder)
        find_shards(folder)
    chosen = choose_dtype(dtype, config.dtype, where)
    name = chosen.name
    kv_name = name if kv_cache_dtype == "auto" else kv_cache_dtype
    longest = _max_len(max_model_len, config)
    if block_size < 1:
        raise ConfigError.of("block_size", block_size, "must be at least 1")
    _check_kv_dtype(kv_name, block_size * config.head_dim, where)
    check_ranks(config, size, where)
    graph_plan = None
    if make_graphs is not None:
        largest = min(max_graph_seqs or max_num_seqs, max_num_seqs)
        graph_plan = _plan_graphs(config, name, kv_name, block_size, largest, longest)
    plan = plan_memory(
        config,
        dtype=name,
        kv_dtype=kv_name,
        block_size=block_size,
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        available_bytes=int(_available_bytes(where) * memory_share),
        num_ranks=size,
        keeps_levels=keeps_stored_levels(config, getattr(torch, name), where),
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_blocks=num_blocks,
        graph_bytes=graph_plan.num_bytes if graph_plan else 0,
    )
    if max_model_len is not None and plan.longest_context < max_model_len:
        raise ConfigError.of(
            "max_model_len",
            max_model_len,
            f"{plan.num_blocks} KV blocks hold {plan.longest_context} tokens; lower it, or raise "
            "kv_cache_memory_bytes or gpu_memory_utilization",
        )
    (on_plan or _log_plan)(plan)
    sizes = KvLayout(
        fingerprint="",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_name,
        block_size=block_size,
    )
    report_phase("loading weights")
    followers = start_followers(size, folder, config, name, sizes, plan.num_blocks, longest)
    shard = followers.ranks.shard
    try:
        with naming_model(model):
            parameters, digest = load_parameters(
                folder, config, getattr(torch, name), where, progress, shard
            )
        followers.wait_ready(digest)
    except BaseException:
        followers.close()
        raise
    layout = replace(sizes, fingerprint=f"{digest}:{config.kv_digest}")
    rope = make_rope(config, longest, where)
    spec = EngineSpec(
        model=served_model_name or model,
        layout=layout,
        num_blocks=plan.num_blocks,
        vocab_size=config.vocab_size,
        max_model_len=plan.longest_context,
        shared_prompt_limit=config.max_position_embeddings if rope.is_dynamic else None,
        # Other ranks know of a step what they are told, and what was drawn stays with this one.
        max_num_launches=1 if size > 1 else 2,
        computes_aside=where.type == "cuda",
        numerics=numerics_of(where, name),
        dtype_reason=chosen.reason,
    )
    if spec.numerics.is_fallback:
        _log.warning("%s (%s)", FALLBACK_NOTICE, why_none())
    own = shard.attention_config(config)
    pool = followers.make_pool(layout, plan.num_blocks, where)
    decoder = make_decoder(own, parameters, pool.tensor.dtype, followers.ranks)
    parts = StepModel(own, decoder, rope, pool)
    steps: StepRunner = EagerSteps(parts, followers)
    if make_graphs is not None and graph_plan is not None:
        steps = _capture(parts, graph_plan, make_graphs(where), steps)
    return TorchEngine(spec, pool, steps, layer_group_size, followers)


def _plan_graphs(
    config: ModelConfig, dtype: str, kv_dtype: str, block_size: int, largest: int, longest: int
) -> GraphPlan:
    # Imports Triton, which is not everywhere.
    from baton.engine.step_graphs import plan_graphs

    pool = torch.empty(
        (0, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim),
        dtype=torch.int8 if kv_dtype in SCALED_DTYPES else getattr(torch, kv_dtype),
        device="meta",
    )
    return plan_graphs(config, pool, getattr(torch, dtype), largest, longest)


def _capture(
    model: StepModel, plan: GraphPlan, device: GraphDevice, eager: StepRunner
) -> ReplayedSteps:
    from baton.engine.step_graphs import ReplayedSteps

    num_seqs = plan.shapes[-1].num_seqs
    _log.info("capturing %d graphs of steps of up to %d sequences", len(plan.shapes), num_seqs)
    begin = time.monotonic()
    try:
        steps = ReplayedSteps(model, plan, device, eager)
    except RuntimeError as error:  # torch has no other for a device that fails or is full
        raise ConfigError.of(
            "enforce_eager",
            False,
            f"capturing decode steps failed ({error}); do without graphs, or leave them more "
            "memory by a lower --gpu-memory-utilization or --max-cudagraph-capture-size",
        ) from error
    _log.info("captured %d graphs in %.1f s", len(plan.shapes), time.monotonic() - begin)
    return steps


def _log_plan(plan: MemoryPlan) -> None:
    for name, text in plan.rows():
        _log.info("memory plan: %s: %s", name, text)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError.of("device", name, "use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError.of("device", name, "use cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError.of("device", name, "torch sees no CUDA device here; give cpu or auto")
    return device


def _check_kv_dtype(name: str, head_elements: int, device: torch.device) -> None:
    """head_elements: of one head in a block."""
    if name not in {*DTYPES, *SCALED_DTYPES}:
        known = ", ".join((*DTYPES, *sorted(SCALED_DTYPES)))
        raise ConfigError.of("kv_cache_dtype", name, f"use auto, {known}")
    if name in SCALED_DTYPES and head_elements % SCALE_BYTES:
        raise ConfigError.of(
            "kv_cache_dtype",
            name,
            f"a block has {head_elements} elements of a head, no multiple of {SCALE_BYTES}; use a "
            "--block-size that is one",
        )
    if (
        name == "fp8"
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < (8, 9)
    ):
        raise ConfigError.of("kv_cache_dtype", name, "this GPU is too old for it; use int8")


def _max_len(asked: int | None, config: ModelConfig) -> int:
    longest = config.derived_max_len
    if asked is None:
        return longest
    if not 1 <= asked <= longest:
        raise ConfigError.of(
            "max_model_len", asked, f"the model's context is {longest} tokens; use 1 to {longest}"
        )
    return asked


def _available_bytes(device: torch.device) -> int:
    """Memory that can be had now: the device's, or this machine's within the process's cgroup."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory_bytes()
