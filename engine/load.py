"""Loads an engine from a checkpoint: chooses settings, plans memory, reads weights, makes the KV
pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from baton.errors import ConfigError
from baton.kv_transports import planned_device_bytes
from baton.start_log import report_phase
from baton.types import DTYPE_BYTES, FALLBACK_NOTICE, SCALE_BYTES, SCALED_DTYPES, KvLayout
from baton_kernels.attention_backends import REFERENCE, AttentionBackend, batch_invariant
from baton_kernels.cpu.library import why_none
from engine.checkpoint import find_shards, naming_model, resolve_checkpoint
from engine.choose_source import model_source
from engine.config import DeviceConfig, EngineConfig, LoraConfig, ModelChoice
from engine.cuda.warm_up import warm_up
from engine.dtype import choose_dtype
from engine.families.config import DTYPES
from engine.host_memory import host_budget
from engine.interface import EngineSpec
from engine.kv.groups.window import windows_of
from engine.kv.layout import groups_of
from engine.kv.tensors.device_states import record_bytes_on
from engine.kv.tensors.state_memory import state_bytes
from engine.memory_plan import HeadMemory, MemoryPlan, plan_blocks
from engine.memory_reservations import Reservations
from engine.model_source import EnginePlan, LoadedModel, ModelSource
from engine.numerics import numerics_of, sums_of
from engine.ranks.backends import choose_backend
from engine.ranks.mesh import Degrees
from engine.torch.adapters import Adapter, adapters_digest
from engine.torch.device_tables import table_bytes, table_width
from engine.torch.engine import TorchEngine
from engine.torch.grouped_adapters import padded_bytes
from engine.torch.weights import ProgressHook

_log = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig,
    on_plan: Callable[[MemoryPlan], None] | None = None,
    progress: ProgressHook | None = None,
) -> TorchEngine:
    """Load a checkpoint and make its KV pool.

    on_plan: called with the memory plan before loading; default: logs it. progress: called for each
    tensor read; default: a progress bar on terminals. Raises ConfigError and ModelError (see
    baton.errors).
    """
    _set_threads(config.device)
    device = _device(config.device.device)
    settled = _settle(_open_checkpoint(config.model), config, device)
    memory, release = _reserve_memory(settled, config)
    (on_plan or _log_plan)(memory)
    loaded = _load_weights(settled, memory, config.model.model, progress)
    spec = _spec(settled, memory, loaded, config.model)
    pool = loaded.followers.make_pool(
        *(spec.layout, memory.num_blocks, memory.num_window_slots, memory.max_num_seqs), device
    )
    steps = loaded.steps(pool)
    limits = config.limits

    def close() -> None:
        loaded.close()
        release()

    engine = TorchEngine(
        *(spec, pool, steps, limits.layer_group_size, loaded.followers, waiting_for(device)),
        close,
    )
    if device.type == "cuda":
        warm_up(engine, limits.max_num_batched_tokens, limits.max_num_seqs, _report_warm_up)
    return engine


@dataclass(frozen=True, slots=True)
class _Settled:
    """Choices made before memory is planned; `plan` has no blocks yet."""

    source: ModelSource
    plan: EnginePlan
    dtype_reason: str


def _set_threads(config: DeviceConfig) -> None:
    num_ranks, num_nodes = config.degrees.num_ranks, config.nodes.size
    if config.num_threads is not None or num_ranks > 1:
        num_threads = config.num_threads or torch.get_num_threads() * num_nodes
        torch.set_num_threads(max(1, num_threads // num_ranks))


def _open_checkpoint(choice: ModelChoice) -> ModelSource:
    """Open a checkpoint. Raises ModelError, also for missing shards."""
    with naming_model(choice.model):
        folder = resolve_checkpoint(choice.model, choice.revision)
        source = model_source(folder, choice.implementation, choice.overrides)
        find_shards(folder)
    return source


def _settle(source: ModelSource, config: EngineConfig, device: torch.device) -> _Settled:
    """Choose types, length, attention and adapters. Raises ConfigError, AdapterError."""
    choice, cache, limits, degrees = (
        config.model,
        config.cache,
        config.limits,
        config.device.degrees,
    )
    chosen = choose_dtype(choice.dtype, source.dtype, device)
    kv_dtype = chosen.name if cache.dtype == "auto" else cache.dtype
    max_len = _max_len(choice.max_model_len, source)
    source = source.for_length(max_len)
    if cache.block_size < 1:
        raise ConfigError.of("block_size", cache.block_size, "must be at least 1")
    check_kv_dtype(kv_dtype, cache.block_size * source.head_dim, device)
    source.check_ranks(degrees, device)
    config.device.nodes.check(degrees)
    if device.type == "cuda":
        _check_gpus(config.device, device)
    plan = EnginePlan(
        device=device,
        dtype=chosen.name,
        layout=kv_layout(source, kv_dtype, cache.block_size),
        num_blocks=0,
        max_len=max_len,
        degrees=degrees,
        backend=choose_backend(config.device.backend, device, config.device.nodes.size),
        nodes=config.device.nodes,
        kv_service=config.device.kv_service,
        expert_load_file=config.device.expert_load_file,
        max_seqs=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        attention=_choose_attention(source, config, chosen.name, kv_dtype, device),
        adapters=_read_adapters(source, config.lora, chosen.name, device, degrees),
        batch_invariant=choice.batch_invariant,
        graphs=config.graphs,
    )
    _check_states(source, plan)
    return _Settled(source, plan, chosen.reason)


def _check_states(source: ModelSource, plan: EnginePlan) -> None:
    """Raise ConfigError if ranks with states of their own have none in the first stage, where rank
    0 counts the tokens of all."""
    parts = source.rank_parts(plan.layout, plan.degrees)
    if plan.kv_service and source.num_state_layers and not parts[0].num_states:
        raise ConfigError.of(
            "pipeline_parallel_size",
            plan.degrees.pipeline,
            "the first stage has no layer with a state, which --kv-per-rank and --nnodes need; "
            "give fewer stages",
        )


def _choose_attention(
    source: ModelSource, config: EngineConfig, dtype: str, kv_dtype: str, device: torch.device
) -> AttentionBackend:
    """The attention backend. Raises ConfigError."""
    name = config.model.attention_backend
    attention = source.choose_attention(name, dtype, kv_dtype, device, config.cache.block_size)
    if config.device.degrees.num_ranks > 1 and name != "auto":
        raise ConfigError.of("attention_backend", name, "several ranks have their own; use auto")
    if config.model.batch_invariant:
        num_ranks, modules = config.device.degrees.num_ranks, config.lora.modules
        return _batch_invariant(source, attention, dtype, device, num_ranks, modules)
    return attention


def _reserve_memory(
    settled: _Settled, config: EngineConfig
) -> tuple[MemoryPlan, Callable[[], None]]:
    """Plan memory; on a CPU, make it known to other workers until the function is called. Raises
    ConfigError."""
    device, share = settled.plan.device, config.cache.memory_share
    if device.type == "cuda":
        return _plan_memory(settled, config, _gpu_bytes(device, share), None), lambda: None
    num_ranks = settled.plan.degrees.num_ranks // settled.plan.nodes.size
    with ExitStack() as stack:
        reservations = None
        try:
            reservations = stack.enter_context(Reservations.of_user())
        except OSError as error:
            _log.info("memory that other workers have planned counts as free: %s", error)
        host = host_budget(share, reservations.pending_bytes() if reservations else 0)
        memory = _plan_memory(settled, config, host.available_bytes, host.default_kv_bytes)
        if reservations is None:
            return memory, lambda: None
        try:
            return memory, reservations.reserve(memory.rank_bytes * num_ranks).close
        except OSError as error:
            _log.info("memory that this worker plans counts as free for others: %s", error)
            return memory, lambda: None


def _gpu_bytes(device: torch.device, share: float) -> int:
    """A share of all memory of a GPU, as far as it is free."""
    free, total = torch.cuda.mem_get_info(device)
    return min(free, int(total * share))


def _plan_memory(
    settled: _Settled, config: EngineConfig, available_bytes: int, default_kv_bytes: int | None
) -> MemoryPlan:
    """Plan memory. available_bytes: of this node. default_kv_bytes: see plan_blocks. Raises
    ConfigError if the model, or max_model_len tokens of KV, do not fit."""
    source, plan = settled.source, settled.plan
    where, sizes, head = plan.device, plan.layout, config.draft_head
    limits = config.limits
    # Ranks of a context that exchange the rows of one pool each, see ContextKv.
    is_apart = bool(plan.kv_service) and plan.degrees.context > 1
    max_num_seqs, max_num_batched_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    memory = plan_blocks(
        sizes,
        dtype=plan.dtype,
        weights=source.weight_bytes(plan.dtype, where, plan.degrees)
        + sum(adapter.num_bytes for adapter in plan.adapters.values())
        + (padded_bytes(plan.adapters, DTYPE_BYTES[plan.dtype]) if where.type != "cpu" else 0),
        states=_state_bytes(source, plan, max_num_seqs),
        activations=source.activation_bytes(
            plan.dtype, max_num_batched_tokens, max_num_seqs, plan.max_len
        )
        + _table_bytes(plan),
        graphs=source.graph_bytes(plan),
        head=source.head_memory(head, plan.dtype, sizes.block_size)
        if head
        else _summaries(plan.attention, sizes),
        transfers=planned_device_bytes() if where.type == "cuda" else 0,
        max_model_len=plan.max_len,
        max_num_seqs=max_num_seqs,
        available_bytes=available_bytes
        * (plan.nodes.size if where.type == "cpu" else plan.degrees.num_ranks),
        default_kv_bytes=default_kv_bytes and default_kv_bytes * plan.nodes.size,
        degrees=plan.degrees,
        kv_cache_memory_bytes=config.cache.memory_bytes,
        num_blocks=config.cache.num_blocks,
        max_window_slots=max_window_slots(source, sizes, max_num_seqs, max_num_batched_tokens)
        if limits.frees_windows and not is_apart
        else 0,
        num_sharing=1 if is_apart else plan.degrees.context,
    )
    asked = config.model.max_model_len
    if asked is not None and memory.longest_context < asked:
        raise ConfigError.of(
            "max_model_len",
            asked,
            f"{memory.num_blocks} KV blocks hold {memory.longest_context} tokens; lower it, or "
            "raise kv_cache_memory_bytes or gpu_memory_utilization",
        )
    return memory


def _state_bytes(source: ModelSource, plan: EnginePlan, max_num_seqs: int) -> int:
    """Bytes of states of one rank: of its layers, or a part of the memory that all ranks share."""
    if not plan.kv_service:
        whole = record_bytes_on(plan.device, plan.layout, max_num_seqs)
        return -(-whole // plan.degrees.num_ranks)
    parts = source.rank_parts(plan.layout, plan.degrees)
    return max(state_bytes(part.layout(plan.layout), max_num_seqs) for part in parts)


def _load_weights(
    settled: _Settled, memory: MemoryPlan, model: str, progress: ProgressHook | None
) -> LoadedModel:
    """Read the weights. Raises ModelError."""
    report_phase("loading weights")
    with naming_model(model):
        return settled.source.load(
            replace(
                settled.plan,
                num_blocks=memory.num_blocks,
                num_window_slots=memory.num_window_slots,
            ),
            progress,
        )


def _spec(
    settled: _Settled, memory: MemoryPlan, loaded: LoadedModel, choice: ModelChoice
) -> EngineSpec:
    """The engine's spec."""
    source, plan = settled.source, settled.plan
    digests = [loaded.digest, source.kv_digest]
    if plan.adapters:
        digests.append(adapters_digest(plan.adapters))
    layout = replace(plan.layout, fingerprint=":".join(digests))
    sums = sums_of(plan.degrees, plan.backend)
    kernels = ".".join(filter(None, (source.kernels, plan.attention.version, sums)))
    numerics = numerics_of(plan.device, plan.dtype, kernels)
    if numerics.is_fallback:
        _log.warning("%s (%s)", FALLBACK_NOTICE, why_none())
    return EngineSpec(
        model=choice.served_name or choice.model,
        layout=layout,
        num_blocks=memory.num_blocks,
        vocab_size=source.vocab_size,
        max_model_len=memory.longest_context,
        shared_prompt_limit=loaded.shared_prompt_limit,
        max_num_launches=_max_num_launches(plan),
        is_pipelined=plan.degrees.pipeline > 1,
        computes_aside=plan.device.type == "cuda" or plan.degrees.pipeline > 1,
        numerics=numerics,
        dtype_reason=settled.dtype_reason,
        adapters=tuple(plan.adapters),
    )


def _max_num_launches(plan: EnginePlan) -> int:
    """See EngineSpec."""
    # Records of one step are kept, so two discarded steps could not run again.
    if groups_of(plan.layout).cannot_rewind:
        return 1
    if plan.degrees.pipeline > 1:
        return plan.degrees.pipeline
    # Followers receive only the batch, not sampled tokens.
    return 1 if plan.degrees.num_ranks > 1 else 2


def kv_layout(source: ModelSource, dtype: str, block_size: int) -> KvLayout:
    """KV layout of the whole model, without a fingerprint, which depends on the weights."""
    window, windowed_layers = windows_of(source.windows)
    return KvLayout(
        fingerprint="",
        num_layers=source.num_layers,
        num_kv_heads=source.num_kv_heads,
        head_dim=source.head_dim,
        dtype=dtype,
        block_size=block_size,
        parts=source.kv_parts,
        window=window,
        windowed_layers=windowed_layers,
        num_state_layers=source.num_state_layers,
        state_layer_bytes=source.state_layer_bytes,
    )


def max_window_slots(
    source: ModelSource,
    layout: KvLayout,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> int:
    """Maximum slots for layers that keep fewer than all tokens, apart from the others; 0 if blocks
    hold the KV of all layers: if LayerGroups.max_slots is 0, and for layers that transformers' code
    runs.

    The callers also have none for a draft model, which does not slide (see StepLimits), and if
    there would be no more blocks than slots (plan_blocks).
    """
    if not source.takes_grouped_kv:
        return 0
    return groups_of(layout).max_slots(max_num_seqs, max_num_batched_tokens)


def _batch_invariant(
    source: ModelSource,
    attention: AttentionBackend,
    dtype: str,
    device: torch.device,
    num_ranks: int,
    lora_modules: Mapping[str, str],
) -> AttentionBackend:
    """The batch-invariant backend that replaces `attention`. Raises ConfigError."""
    option = "batch_invariant"
    source.check_batch_invariant(dtype, device)
    if attention is not REFERENCE:
        raise ConfigError.of(
            option, True, f"--attention-backend={attention.name} does not hold it; use auto"
        )
    if device.type == "cpu":
        return attention
    if num_ranks > 1:
        raise ConfigError.of(
            option, True, f"{num_ranks} ranks on GPUs do not hold it; leave it out"
        )
    if lora_modules:
        raise ConfigError.of(
            option, True, "adapters' products follow the batch on a GPU; leave out --lora-modules"
        )
    return batch_invariant()


def _read_adapters(
    source: ModelSource, lora: LoraConfig, dtype: str, device: torch.device, degrees: Degrees
) -> dict[str, Adapter]:
    """Adapters by name. Raises ConfigError, AdapterError."""
    if lora.modules and degrees.num_ranks > 1:
        raise ConfigError.of(
            "lora_modules",
            ",".join(lora.modules),
            f"adapters run on one rank only, not {degrees.num_ranks}; leave it out, or use one",
        )
    return {
        name: source.read_adapter(Path(path), dtype, device, lora.max_rank)
        for name, path in lora.modules.items()
    }


def _summaries(attention: AttentionBackend, layout: KvLayout) -> HeadMemory:
    """What sparse decode keeps of each block."""
    row_bytes = layout.block_bytes // (layout.block_size * len(layout.parts))
    return HeadMemory(0, attention.kept_rows * row_bytes, "summaries of keys")


def _table_bytes(plan: EnginePlan) -> int:
    """Bytes of block tables in a device's memory."""
    if plan.device.type == "cpu":
        return 0
    one = table_bytes(plan.max_seqs, table_width(plan.max_len, plan.layout.block_size))
    return one * len(groups_of(plan.layout).paged)


def waiting_for(device: torch.device) -> Callable[[], None]:
    """A function that waits for all work given to the device; the CPU is synchronous."""
    if device.type == "cuda":
        return partial(torch.cuda.synchronize, device)
    return lambda: None


def _report_warm_up(num_done: int, num_batches: int) -> None:
    report_phase(f"compiling kernels ({num_done}/{num_batches})")


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


def _check_gpus(config: DeviceConfig, device: torch.device) -> None:
    """Raise ConfigError unless this node has a GPU for each of its ranks, from `device` on."""
    num_ranks = config.degrees.num_ranks // config.nodes.size
    first, num_gpus = device.index or 0, torch.cuda.device_count()
    if first + num_ranks > num_gpus:
        raise ConfigError.of(
            *("device", device),
            f"{num_ranks} ranks of this host need GPUs {first} to {first + num_ranks - 1}, and "
            f"torch sees {num_gpus}; name an earlier one, or give fewer ranks",
        )


def check_kv_dtype(name: str, head_elements: int, device: torch.device) -> None:
    """Raise ConfigError unless the device supports KV of this dtype. head_elements: elements of one
    head in a block."""
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


def _max_len(asked: int | None, source: ModelSource) -> int:
    if asked is None:
        return source.max_len
    if not 1 <= asked <= (longest := source.longest_len):
        raise ConfigError.of(
            "max_model_len", asked, f"the model's context is {longest} tokens; use 1 to {longest}"
        )
    return asked
