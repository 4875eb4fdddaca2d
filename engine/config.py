"""Configuration of an engine: the model, its KV cache, the limits of a step, the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoint import HeadFiles
from engine.families.overrides import NO_OVERRIDES, ConfigOverrides
from engine.ranks.mesh import ONE_RANK, Degrees
from engine.ranks.nodes import ONE_NODE, Nodes

if TYPE_CHECKING:
    # Imports torch, which takes seconds.
    from engine.model_source import Graphs


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The checkpoint and its computation.

    model: folder or hub id. implementation: see choose_implementation. max_model_len: in tokens;
    None: the checkpoint's. attention_backend: see choose_attention; must be `auto` with several
    ranks. batch_invariant: see EnginePlan. overrides: changes of config.json.
    """

    model: str
    revision: str | None = None
    implementation: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    served_name: str | None = None
    attention_backend: str = "auto"
    batch_invariant: bool = False
    overrides: ConfigOverrides = NO_OVERRIDES


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache. Its size is num_blocks, else memory_bytes, else the part of memory_share (0..1)
    of the device's memory that weights leave free. block_size: in tokens."""

    block_size: int = 16
    dtype: str = "auto"
    num_blocks: int | None = None
    memory_bytes: int | None = None
    memory_share: float = 0.8


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of one step. layer_group_size: layers between two checks for aborted sequences, and
    between two reports of ready KV.

    frees_windows: the caller's BlockPool has the allocators of `engine.kv.slot_tables` and its
    leases slide: see max_window_slots.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    layer_group_size: int = 4
    frees_windows: bool = False


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """device: cpu, cuda or cuda:N. num_threads: total of all ranks; None: torch's default. backend:
    of the ranks' exchange, see choose_backend. nodes: hosts of the ranks. kv_service: see RankSpec.
    expert_load_file: see engine.ranks.expert_load; None: experts alternate."""

    device: str = "cpu"
    num_threads: int | None = None
    degrees: Degrees = ONE_RANK
    backend: str = "auto"
    nodes: Nodes = ONE_NODE
    kv_service: str = ""
    expert_load_file: Path | None = None


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters of rank at most max_rank. modules: folder by adapter name."""

    modules: Mapping[str, str] = field(default_factory=dict)
    max_rank: int = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """graphs: recording of decode steps, which needs Triton; None: all steps run eagerly, as for
    all models run by transformers. draft_head: files of a draft head to reserve memory for."""

    model: ModelChoice
    cache: CacheConfig = CacheConfig()
    limits: StepLimits = StepLimits()
    device: DeviceConfig = DeviceConfig()
    lora: LoraConfig = LoraConfig()
    graphs: Graphs | None = None
    draft_head: HeadFiles | None = None
