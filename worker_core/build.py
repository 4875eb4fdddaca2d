"""From options to a loaded engine."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from baton.config import DecodeOptions, EngineOptions
from baton.start_log import report_phase
from engine.checkpoint import (
    HeadFiles,
    check_checkpoint,
    naming_model,
    resolve_checkpoint,
)
from engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelChoice,
    StepLimits,
)
from engine.families.overrides import ConfigOverrides
from engine.grammar import GrammarVocabulary, Matchers, load_vocabulary, synthetic_vocabulary
from engine.interface import Engine
from engine.kv.layout import groups_of
from engine.kv.pool import BlockPool
from engine.oracle import OracleEngine, OracleLayers, OracleOptions, oracle_layout
from worker_core.nodes import degrees_of, nodes_of
from worker_core.threads import Threads

_log = logging.getLogger(__name__)

#: Serves the KV of a rank in its process.
KV_SERVICE = "kv_transfer.remote_port"

#: Default blocks of an oracle engine, which has no real KV memory.
_ORACLE_BLOCKS = 4096


def build_engine(
    options: EngineOptions,
    max_graph_tokens: int | None = None,
    draft_head: HeadFiles | None = None,
    *,
    frees_windows: bool = True,
) -> Engine:
    """Load the engine that the options name. Takes as long as reading the weights; raises
    StartupError.

    max_graph_tokens: maximum new tokens of a decode step captured as a GPU graph; None: no capture.
    draft_head: see EngineConfig; frees_windows: see StepLimits.
    """
    if options.engine == "oracle":
        return _build_oracle(options, frees_windows=frees_windows)
    return _build_torch(options, max_graph_tokens, draft_head, frees_windows=frees_windows)


def build_decode_engine(options: DecodeOptions, *, frees_windows: bool = True) -> Engine:
    """The engine of a decode worker. See build_engine."""
    head = draft_head_files(options)
    return build_engine(options, options.max_graph_tokens, head, frees_windows=frees_windows)


def draft_head_files(options: DecodeOptions) -> HeadFiles | None:
    """Files of the draft heads that the options name; None without any. Raises ModelError."""
    method = options.speculative_method
    if options.engine == "oracle" or method not in ("eagle", "medusa", "mtp"):
        return None
    if method == "mtp":
        return HeadFiles(method, resolve_checkpoint(options.model, options.revision))
    return HeadFiles(method, resolve_checkpoint(str(options.speculative_model)))


def build_pool(options: EngineOptions, engine: Engine, secret: bytes) -> BlockPool:
    """The pool over an engine's blocks. secret: 32 random bytes. Prefix caching is off for models
    that cannot continue from a prefix."""
    groups = engine.kv.groups
    if groups.cannot_rewind and options.enable_prefix_caching:
        _log.info("prefix caching is off: %s has %s", options.model_name, groups.cannot_rewind)
    return BlockPool(
        engine.spec.num_blocks,
        groups,
        secret=secret,
        allocators=groups.allocators(engine.kv.slot_tables),
        enable_prefix_caching=options.enable_prefix_caching and not groups.cannot_rewind,
    )


def build_matchers(options: EngineOptions, engine: Engine) -> Matchers:
    """Matchers for the model's tokens; an oracle engine without a tokenizer gets a vocabulary that
    is made up."""
    vocab_size = engine.spec.vocab_size

    def load() -> GrammarVocabulary:
        if options.engine == "oracle" and not (Path(options.model) / "tokenizer.json").is_file():
            return synthetic_vocabulary(vocab_size)
        return load_vocabulary(resolve_checkpoint(options.model, options.revision), vocab_size)

    return Matchers(load, ThreadPoolExecutor(1, thread_name_prefix="grammar"))


def _build_oracle(options: EngineOptions, *, frees_windows: bool) -> OracleEngine:
    num_blocks = options.num_gpu_blocks_override or _ORACLE_BLOCKS
    layers = OracleLayers(options.oracle_window, has_states=options.oracle_has_states)
    num_slots = 0
    if frees_windows and not layers.has_states:
        groups = groups_of(oracle_layout(layers, options.block_size))
        num_slots = groups.max_slots(options.max_num_seqs, options.max_num_batched_tokens)
    return OracleEngine(
        OracleOptions(
            num_blocks=num_blocks,
            block_size=options.block_size,
            max_model_len=options.max_model_len or 4096,
            step_s=options.oracle_step_ms / 1000,
            token_s=options.oracle_token_us / 1e6,
            model=options.model_name,
            adapters=tuple(options.adapter_paths),
            layers=layers,
            # As plan_blocks has it.
            num_window_slots=num_slots if num_slots < num_blocks else 0,
            num_state_slots=options.max_num_seqs,
        )
    )


def _build_torch(
    options: EngineOptions,
    max_graph_tokens: int | None,
    draft_head: HeadFiles | None,
    *,
    frees_windows: bool,
) -> Engine:
    with naming_model(options.model):
        check_checkpoint(
            options.model, options.revision, options.model_impl, _overrides_of(options)
        )
    report_phase("importing torch")
    # Only a process that runs a model pays for importing torch: less while nothing looks for
    # garbage.
    with _no_collection():
        from engine.cuda.graph_device import CudaGraphs
        from engine.load import load_engine
        from engine.model_source import Graphs

    device = _device_of(options)
    # Graphs capture Triton kernels.
    can_capture = device.startswith("cuda") and find_spec("triton") is not None
    graphs = None
    if can_capture and max_graph_tokens is not None:
        graphs = Graphs(CudaGraphs, max_graph_tokens)
    config = _engine_config(options, device, frees_windows=frees_windows)
    return load_engine(replace(config, graphs=graphs, draft_head=draft_head))


def _device_of(options: EngineOptions) -> str:
    import torch

    best = "cuda" if torch.cuda.is_available() else "cpu"
    return best if options.device == "auto" else options.device


def threads_of(options: EngineOptions) -> Threads | None:
    """Threads of a loaded engine; None unless this process computes all, and on the CPU, and may
    use other cores than those of one NUMA node."""
    if options.engine == "oracle" or degrees_of(options).num_ranks > 1:
        return None
    if options.own_numa_node is not None:
        return None
    if _device_of(options) != "cpu":
        return None
    import torch

    return Threads(torch.get_num_threads(), torch.set_num_threads)


def _overrides_of(options: EngineOptions) -> ConfigOverrides:
    return ConfigOverrides.parse(options.hf_overrides, options.rope_scaling)


def _engine_config(options: EngineOptions, device: str, *, frees_windows: bool) -> EngineConfig:
    nodes, degrees = nodes_of(options), degrees_of(options)
    is_on_gpus = degrees.num_ranks > 1 and device != "cpu"
    has_own_kv = options.kv_per_rank or nodes.size > 1 or is_on_gpus
    return EngineConfig(
        ModelChoice(
            model=options.model,
            revision=options.revision,
            implementation=options.model_impl,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            served_name=options.served_model_name,
            attention_backend=options.attention_backend,
            batch_invariant=options.batch_invariant,
            overrides=_overrides_of(options),
        ),
        CacheConfig(
            block_size=options.block_size,
            dtype=options.kv_cache_dtype,
            num_blocks=options.num_gpu_blocks_override,
            memory_bytes=options.kv_cache_memory_bytes,
            memory_share=options.gpu_memory_utilization,
        ),
        StepLimits(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            frees_windows=frees_windows,
        ),
        DeviceConfig(
            device,
            options.num_threads,
            degrees,
            options.distributed_backend,
            nodes,
            KV_SERVICE if has_own_kv else "",
            options.expert_load_file,
        ),
        LoraConfig(options.adapter_paths, options.max_lora_rank),
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection in the body: importing creates no garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
