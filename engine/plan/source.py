"""Reads what a plan needs from a model's config: no weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from baton.config.plan_options import PlanOptions
from baton.errors import ConfigError, ModelError
from baton.gguf.folder import SUFFIX
from baton.types import KvLayout
from baton_kernels.linear import keeps_levels
from baton_kernels.quantized_linear import can_group_float8
from engine.checkpoint import local_folder
from engine.choose_source import model_source
from engine.cuda.graph_device import GraphDevice
from engine.dtype import choose_dtype
from engine.families.config import ModelConfig
from engine.families.overrides import ConfigOverrides
from engine.families.read import choose_implementation, read_config
from engine.load import check_kv_dtype, kv_layout, max_window_slots
from engine.model_source import EnginePlan, Graphs, ModelSource
from engine.plan.degrees import Check
from engine.plan.model import ModelSizes, described_sizes, native_sizes, native_storage
from engine.ranks.mesh import ONE_RANK


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model on one kind of device.

    check: see engine.plan.degrees. activations: bytes of a step of each rank, by the longest
    context. graph_bytes: of recorded steps of each rank; None if not known here.
    keeps_windows_apart: see sequence_bytes.
    """

    sizes: ModelSizes
    check: Check
    activations: Callable[[int], int]
    graph_bytes: int | None
    keeps_windows_apart: bool


def read_model(options: PlanOptions, kind: str, *, has_float8: bool) -> PlannedModel:
    """Read the config of options.model, a folder, a file or a Hub id on this machine. kind: of
    device, "cuda" or "cpu"; has_float8: whether it multiplies float8. Raises ModelError,
    ConfigError."""
    path = Path(options.model).expanduser()
    if path.is_file() and path.suffix != SUFFIX:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(path, Path(folder) / "config.json")
            return _read(Path(folder), options, kind, has_float8=has_float8)
    found = local_folder(options.model)
    if found is None:
        raise ModelError(
            f"{options.model}: neither a folder, a config.json nor a Hub id on this machine; give "
            "one of these"
        )
    return _read(found, options, kind, has_float8=has_float8)


def _read(folder: Path, options: PlanOptions, kind: str, *, has_float8: bool) -> PlannedModel:
    overrides = ConfigOverrides.parse(options.hf_overrides, options.rope_scaling)
    source, device = model_source(folder, options.model_impl, overrides), torch.device(kind)
    dtype = choose_dtype(options.dtype, source.dtype, device).name
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    if kv_dtype == "fp8" and not (has_float8 or kind == "cpu"):
        raise ConfigError.of("kv_cache_dtype", kv_dtype, "this GPU is too old for it; use int8")
    check_kv_dtype(kv_dtype, options.block_size * source.head_dim, torch.device("cpu"))
    layout = kv_layout(source, kv_dtype, options.block_size)
    limits = options.max_num_seqs, options.max_num_batched_tokens
    if choose_implementation(folder, options.model_impl, overrides).name == "baton":
        config = read_config(folder, overrides)
        sizes = _native(config, source, dtype, layout, device, has_float8=has_float8)
    else:
        from engine.transformers.describe import describe

        sizes = described_sizes(describe(folder, overrides), dtype, layout)
    return PlannedModel(
        sizes,
        # Whether GPUs run such ranks, too, is not asked.
        partial(source.check_ranks, device=torch.device("cpu")),
        partial(source.activation_bytes, dtype, limits[1], limits[0]),
        _graph_bytes(source, dtype, layout, options) if kind == "cuda" else 0,
        bool(max_window_slots(source, layout, *limits)),
    )


def _native(
    config: ModelConfig,
    source: ModelSource,
    dtype: str,
    layout: KvLayout,
    device: torch.device,
    *,
    has_float8: bool,
) -> ModelSizes:
    stored = config.quantization
    keeps = False
    if stored is not None:
        group = stored.group_size or config.hidden_size
        if stored.kind == "float":
            keeps = has_float8 and can_group_float8(config.hidden_size, group)
        else:
            keeps = keeps_levels(device, getattr(torch, dtype), stored.bits, group)
    storage = native_storage(dtype, stored, keeps_levels=keeps, has_float8=has_float8)
    return native_sizes(config, storage, layout, source.max_len, source.longest_len)


def _graph_bytes(
    source: ModelSource, dtype: str, layout: KvLayout, options: PlanOptions
) -> int | None:
    """Bytes of recorded decode steps; None without Triton, because they depend on its tiles."""
    if find_spec("triton") is None:
        return None
    plan = EnginePlan(
        device=torch.device("cuda"),
        dtype=dtype,
        layout=layout,
        num_blocks=0,
        max_len=source.max_len,
        degrees=ONE_RANK,
        max_seqs=options.max_num_seqs,
        graphs=Graphs(_no_device, options.max_num_seqs),
    )
    return source.graph_bytes(plan)


def _no_device(device: torch.device) -> GraphDevice:
    raise ConfigError.of("gpu", device, "a plan records no steps")
