"""An engine from a checkpoint: what is asked for is checked, memory is planned, then parameters are
read and the KV pool is made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from baton.errors import ConfigError
from baton.kv_transports import planned_device_bytes
from baton.start_log import report_phase
from baton.types import FALLBACK_NOTICE, SCALE_BYTES, SCALED_DTYPES, KvLayout
from baton_kernels.attention_backends import REFERENCE, AttentionBackend, batch_invariant
from baton_kernels.cpu.library import why_none
from engine.checkpoint import HeadFiles, find_shards, naming_model, resolve_checkpoint
from engine.choose_source import model_source
from engine.cuda.graph_device import GraphDevice
from engine.cuda.warm_up import warm_up
from engine.dtype import choose_dtype
from engine.families.config import DTYPES
from engine.host_memory import available_memory_bytes
from engine.interface import EngineSpec
from engine.kv.groups.window import windows_of
from engine.kv.layout import groups_of
from engine.kv.tensors.state_memory import STATES_PER_SLOT
from engine.kv.tensors.stateful import StatefulKvPool
from engine.memory_plan import NO_HEAD, MemoryPlan, plan_blocks
from engine.model_source import EnginePlan, Graphs, ModelSource
from engine.numerics import numerics_of
from engine.ranks.followers import Followers, TensorPool
from engine.torch.adapters import Adapter, adapters_digest
from engine.torch.device_tables import table_bytes, table_width
from engine.torch.engine import TorchEngine
from engine.torch.weights import ProgressHook

NO_MODULES: Mapping[str, str] = MappingProxyType({})

_log = logging.getLogger(__name__)


def load_engine(
    model: str,
    *,
    revision: str | None = None,
    model_impl: str = "auto",
    attention_backend: str = "auto",
    batch_invariant: bool = False,
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
    lora_modules: Mapping[str, str] = NO_MODULES,
    max_lora_rank: int = 16,
    make_graphs: Callable[[torch.device], GraphDevice] | None = None,
    max_graph_seqs: int | None = None,
    draft_head: HeadFiles | None = None,
    frees_windows: bool = False,
    on_plan: Callable[[MemoryPlan], None] | None = None,
    progress: ProgressHook | None = None,
) -> TorchEngine:
    """Load the checkpoint `model` (a folder or a hub id) and make its KV pool.

    model_impl: whose code runs the layers, see choose_implementation; attention_backend: see
    choose_attention, of one rank; batch_invariant: see EnginePlan. `on_plan` sees the memory plan
    before anything is loaded; by default it is logged. `progress` sees each tensor read; by default
    there is a bar on a terminal. make_graphs: what records decode steps, of up to max_graph_seqs
    sequences; if not given, all steps run eagerly, as those of transformers' models always do. It
    needs Triton's kernels. max_graph_seqs: max_num_seqs, if not given. lora_modules: folders of
    LoRA adapters, of max_lora_rank at most, by the names that slices ask for them by. draft_head:
    that memory is to be left for. frees_windows: the caller's BlockPool has `engine.kv.slots`, and
    its leases slide: see max_window_slots. Raises ConfigError and ModelError (see baton.errors).
    """
    size = tensor_parallel_size
    if num_threads is not None or size > 1:
        torch.set_num_threads(max(1, (num_threads or torch.get_num_threads()) // size))
    where = _device(device)
    with naming_model(model):
        folder = resolve_checkpoint(model, revision)
        source = model_source(folder, model_impl)
        find_shards(folder)
    chosen = choose_dtype(dtype, source.dtype, where)
    kv_name = chosen.name if kv_cache_dtype == "auto" else kv_cache_dtype
    longest = _max_len(max_model_len, source)
    source = source.for_length(longest)
    if block_size < 1:
        raise ConfigError.of("block_size", block_size, "must be at least 1")
    _check_kv_dtype(kv_name, block_size * source.head_dim, where)
    source.check_ranks(size, where)
    attention = source.choose_attention(attention_backend, chosen.name, kv_name, where)
    if size > 1 and attention_backend != "auto":
        raise ConfigError.of(
            "attention_backend", attention_backend, "several ranks have their own; use auto"
        )
    if batch_invariant:
        attention = _batch_invariant(source, attention, chosen.name, where, lora_modules)
    sizes = kv_layout(source, kv_name, block_size)
    adapters = _read_adapters(source, lora_modules, max_lora_rank, chosen.name, where, size)
    graphs = None
    if make_graphs is not None:
        graphs = Graphs(make_graphs, min(max_graph_seqs or max_num_seqs, max_num_seqs))
    settled = EnginePlan(
        where,
        chosen.name,
        sizes,
        0,
        longest,
        size,
        max_num_seqs,
        adapters,
        attention,
        batch_invariant,
    )
    limits = max_num_seqs, max_num_batched_tokens
    memory = plan_blocks(
        sizes,
        dtype=chosen.name,
        weights=source.weight_bytes(chosen.name, where, size)
        + sum(adapter.num_bytes for adapter in adapters.values()),
        states=max_num_seqs * STATES_PER_SLOT * groups_of(sizes).record_bytes,
        activations=source.activation_bytes(
            chosen.name, max_num_batched_tokens, max_num_seqs, longest
        )
        + _table_bytes(settled),
        graphs=source.graph_bytes(settled, graphs),
        head=source.head_memory(draft_head, chosen.name, block_size) if draft_head else NO_HEAD,
        transfers=planned_device_bytes() if where.type == "cuda" else 0,
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        available_bytes=_available_bytes(where, memory_share),
        num_ranks=size,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_blocks=num_blocks,
        max_window_slots=max_window_slots(source, sizes, where, *limits)
        if frees_windows and graphs is None
        else 0,
    )
    if max_model_len is not None and memory.longest_context < max_model_len:
        raise ConfigError.of(
            "max_model_len",
            max_model_len,
            f"{memory.num_blocks} KV blocks hold {memory.longest_context} tokens; lower it, or "
            "raise kv_cache_memory_bytes or gpu_memory_utilization",
        )
    (on_plan or _log_plan)(memory)
    report_phase("loading weights")
    with naming_model(model):
        loaded = source.load(
            replace(
                settled,
                num_blocks=memory.num_blocks,
                num_window_slots=memory.num_window_slots,
            ),
            progress,
        )
    digests = [loaded.digest, source.kv_digest]
    if adapters:
        digests.append(adapters_digest(adapters))
    layout = replace(sizes, fingerprint=":".join(digests))
    whose = (source.kernels, attention.version)
    spec = EngineSpec(
        model=served_model_name or model,
        layout=layout,
        num_blocks=memory.num_blocks,
        vocab_size=source.vocab_size,
        max_model_len=memory.longest_context,
        shared_prompt_limit=loaded.shared_prompt_limit,
        # Followers receive only the batch, not sampled tokens. Records are kept of one step: two
        # that are thrown away could not be run again.
        max_num_launches=1 if size > 1 or groups_of(layout).cannot_rewind else 2,
        computes_aside=where.type == "cuda",
        numerics=numerics_of(where, chosen.name, ".".join(filter(None, whose))),
        dtype_reason=chosen.reason,
        adapters=tuple(adapters),
    )
    if spec.numerics.is_fallback:
        _log.warning("%s (%s)", FALLBACK_NOTICE, why_none())
    followers = loaded.followers
    pool = _make_pool(layout, memory, where, followers)
    steps = loaded.steps(pool, graphs)
    engine = TorchEngine(spec, pool, steps, layer_group_size, followers, waiting_for(where))
    if where.type == "cuda":
        warm_up(engine, max_num_batched_tokens, max_num_seqs, _report_warm_up)
    return engine


def _make_pool(
    layout: KvLayout, memory: MemoryPlan, device: torch.device, followers: Followers
) -> TensorPool:
    if groups_of(layout).records:
        return StatefulKvPool(layout, memory.num_blocks, memory.max_num_seqs)
    return followers.make_pool(layout, memory.num_blocks, memory.num_window_slots, device)


def kv_layout(source: ModelSource, dtype: str, block_size: int) -> KvLayout:
    """Without a fingerprint, which takes the weights."""
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
    device: torch.device,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> int:
    """Most slots that layers with fewer than all tokens need apart from the others; 0 where blocks
    have the KV of all layers. That is so

    * if LayerGroups.max_slots says so;
    * on a GPU: block tables in its memory, and recorded steps, are of one pool;
    * of layers that transformers' code runs, which are given one pool.

    And of a draft model, whose sequences do not slide (load_engine's frees_windows), where steps
    are recorded without a GPU, and where blocks would be no more than slots (plan_blocks)."""
    if device.type != "cpu" or not source.takes_grouped_kv:
        return 0
    return groups_of(layout).max_slots(max_num_seqs, max_num_batched_tokens)


def _batch_invariant(
    source: ModelSource,
    attention: AttentionBackend,
    dtype: str,
    device: torch.device,
    lora_modules: Mapping[str, str],
) -> AttentionBackend:
    """Who computes attention in place of `attention`. Raises ConfigError."""
    option = "batch_invariant"
    source.check_batch_invariant(dtype, device)
    if attention is not REFERENCE:
        raise ConfigError.of(
            option, True, f"--attention-backend={attention.name} does not hold it; use auto"
        )
    if device.type == "cpu":
        return attention
    if lora_modules:
        raise ConfigError.of(
            option, True, "adapters' products follow the batch on a GPU; leave out --lora-modules"
        )
    return batch_invariant()


def _read_adapters(
    source: ModelSource,
    lora_modules: Mapping[str, str],
    max_rank: int,
    dtype: str,
    device: torch.device,
    num_ranks: int,
) -> dict[str, Adapter]:
    """By name. Raises ConfigError, AdapterError."""
    if lora_modules and num_ranks > 1:
        raise ConfigError.of(
            "tensor_parallel_size",
            num_ranks,
            "adapters run on one rank only; leave it out, or --lora-modules",
        )
    return {
        name: source.read_adapter(Path(path), dtype, device, max_rank)
        for name, path in lora_modules.items()
    }


def _table_bytes(plan: EnginePlan) -> int:
    """Of block tables on a device that is not the host."""
    if plan.device.type == "cpu":
        return 0
    return table_bytes(plan.max_seqs, table_width(plan.max_len, plan.layout.block_size))


def waiting_for(device: torch.device) -> Callable[[], None]:
    """Waits for all that the device was given; a CPU has done it when it was given."""
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


def _max_len(asked: int | None, source: ModelSource) -> int:
    if asked is None:
        return source.max_len
    if not 1 <= asked <= (longest := source.longest_len):
        raise ConfigError.of(
            "max_model_len", asked, f"the model's context is {longest} tokens; use 1 to {longest}"
        )
    return asked


def _available_bytes(device: torch.device, share: float) -> int:
    """A share of all memory of a GPU, as far as it is free; of what this machine has free, within
    the process's cgroup."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(free, int(total * share))
    return int(available_memory_bytes() * share)
