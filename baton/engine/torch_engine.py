"""An engine over torch: a model's parameters, its KV pool, and one forward for prefill, decode and verification.

Numerics. A sequence's tokens come from its own rows alone: linear layers, norms and the sampler work row by row, and attention
reads only the sequence's own KV. The batch mix, chunking and block size still change the order in which a matrix product or
a softmax sums, so that logits differ by rounding: about 1e-6 of their size in float32, about 1e-2 in bfloat16. Greedy
outputs are therefore the same but where two logits are closer than that.
On a CPU with AVX-512 bf16 and without a sliding window, bfloat16 KV was bit for bit the same for every chunking tried
(2026-11-20, torch 2.13, one and two threads): attention pads keys and query rows to that end. float32 was not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.interface import Batch, EngineSpec, LayersDone
from baton.engine.torch_kv_pool import TorchKvPool
from baton.engine.torch_step import check_batch, fault, pack_batch, sample_rows
from baton.errors import ConfigError
from baton.model.checkpoint import find_shards, naming_model, resolve_checkpoint
from baton.model.config import DTYPES, ModelConfig, read_config
from baton.model.decoder import Decoder
from baton.model.host_memory import available_memory_bytes
from baton.model.memory_plan import MemoryPlan, plan_memory
from baton.model.parameters import Parameters, empty_parameters
from baton.model.rope import Rope, make_rope
from baton.model.weights import (
    ProgressHook,
    load_weights,
    terminal_progress,
)
from baton.sampling.sampler import broken_rows, sample
from baton.types import KvLayout, Sample

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Model:
    config: ModelConfig
    decoder: Decoder
    rope: Rope


class TorchEngine:
    """See baton.engine.interface.Engine. Driven by one thread."""

    def __init__(
        self,
        spec: EngineSpec,
        config: ModelConfig,
        decoder: Decoder,
        rope: Rope,
        kv: TorchKvPool,
        layer_group_size: int,
    ) -> None:
        """layer_group_size: layers that a forward tells `layers_done` of at once."""
        self._layer_group_size = layer_group_size
        self._spec = spec
        self._model = _Model(config, decoder, rope)
        self._kv = kv

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def kv(self) -> TorchKvPool:
        return self._kv

    def forward(
        self, batch: Batch, layers_done: LayersDone | None = None
    ) -> tuple[tuple[Sample, ...], ...]:
        """See Engine.forward. Raises EngineFault whose metadata["slices"] lists, separated by commas, the indices of the
        slices at fault: a batch without them runs."""
        with torch.inference_mode():
            logits = self.logits(batch, layers_done)
            rows, _, owners = sample_rows(batch)
            if broken := broken_rows(logits):
                raise fault("the model's output is not finite", [owners[i] for i in broken])
            samples = sample(logits, rows) if rows else []
        split: list[list[Sample]] = [[] for _ in batch.slices]
        for owner, one in zip(owners, samples, strict=True):
            split[owner].append(one)
        return tuple(map(tuple, split))

    def logits(self, batch: Batch, layers_done: LayersDone | None = None) -> torch.Tensor:
        """Write the new tokens' KV; returns the logits of all sample rows, slice by slice, [rows, vocab] float32."""
        spec, model = self._spec, self._model
        check_batch(
            batch, spec.layout.block_size, spec.num_blocks, spec.vocab_size, spec.max_model_len
        )
        if not batch.slices:
            return torch.empty(0, spec.vocab_size)
        with torch.inference_mode():
            packed = pack_batch(batch, model.config, model.rope, self._kv.tensor)
            done = (
                _in_groups(layers_done, model.config.num_layers, self._layer_group_size)
                if layers_done
                else None
            )
            hidden = model.decoder.forward(packed, self._kv.tensor, done)
            _, packed_rows, _ = sample_rows(batch)
            index = torch.tensor(packed_rows, dtype=torch.int64, device=hidden.device)
            return model.decoder.logits(hidden[index])


def _in_groups(layers_done: LayersDone, num_layers: int, size: int) -> Callable[[int], None]:
    """Tell `layers_done` about groups of `size` consecutive layers instead of each."""

    def done(layer: int) -> None:
        end = layer + 1
        if end % size == 0 or end == num_layers:
            first = layer // size * size
            layers_done(first, end - first)

    return done


def load_engine(
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
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
    on_plan: Callable[[MemoryPlan], None] | None = None,
    progress: ProgressHook | None = None,
) -> TorchEngine:
    """Load the checkpoint `model` (a folder or a hub id) and make its KV pool.

    `on_plan` sees the memory plan before anything is loaded; by default it is logged. `progress` sees each tensor read; by
    default there is a bar on a terminal. Raises ConfigError and ModelError (see baton.errors).
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    where = _device(device)
    with naming_model(model):
        folder = resolve_checkpoint(model, revision)
        config = read_config(folder)
        find_shards(folder)
    name = _dtype_name(dtype, config)
    longest = _max_len(max_model_len, config)
    if block_size < 1:
        raise ConfigError.of("block_size", block_size, "must be at least 1")
    plan = plan_memory(
        config,
        dtype=name,
        block_size=block_size,
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        available_bytes=int(_available_bytes(where) * memory_share),
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_blocks=num_blocks,
    )
    if max_model_len is not None and plan.longest_context < max_model_len:
        raise ConfigError.of(
            "max_model_len",
            max_model_len,
            f"{plan.num_blocks} KV blocks hold {plan.longest_context} tokens; lower it, or raise "
            "kv_cache_memory_bytes or gpu_memory_utilization",
        )
    (on_plan or _log_plan)(plan)
    parameters = empty_parameters(config, getattr(torch, name), where)
    with naming_model(model):
        digest = _load(folder, parameters, progress)
    layout = KvLayout(
        fingerprint=f"{digest}:{config.kv_digest}",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=name,
        block_size=block_size,
    )
    rope = make_rope(config, longest, where)
    spec = EngineSpec(
        model=served_model_name or model,
        layout=layout,
        num_blocks=plan.num_blocks,
        vocab_size=config.vocab_size,
        max_model_len=plan.longest_context,
        shared_prompt_limit=config.max_position_embeddings if rope.is_dynamic else None,
    )
    pool = TorchKvPool(layout, plan.num_blocks, where)
    return TorchEngine(spec, config, Decoder(config, parameters), rope, pool, layer_group_size)


def _load(folder: Path, parameters: Parameters, progress: ProgressHook | None) -> str:
    if progress is not None:
        return load_weights(folder, parameters, progress)
    with terminal_progress() as show:
        return load_weights(folder, parameters, show)


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


def _dtype_name(dtype: str, config: ModelConfig) -> str:
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ConfigError.of("dtype", dtype, f"use auto, {', '.join(DTYPES)}")
    return name


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
