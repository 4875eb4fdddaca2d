"""What an engine is loaded with: the model, its KV cache, the limits of a step, the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.checkpoint import HeadFiles

if TYPE_CHECKING:
    # Imports torch, which takes seconds.
    from engine.model_source import Graphs


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The checkpoint and how it is computed.

    model: a folder or a hub id. implementation: who runs the layers, see choose_implementation.
    max_model_len: in tokens; None: the checkpoint's own. attention_backend: see choose_attention;
    only `auto` with several ranks. batch_invariant: see EnginePlan.
    """

    model: str
    revision: str | None = None
    implementation: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    served_name: str | None = None
    attention_backend: str = "auto"
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache. num_blocks comes before memory_bytes, and that before what memory_share of the
    device's memory, 0..1, leaves beside the weights. block_size: in tokens."""

    block_size: int = 16
    dtype: str = "auto"
    num_blocks: int | None = None
    memory_bytes: int | None = None
    memory_share: float = 0.8


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of one step. layer_group_size: layers between two looks at aborted sequences and
    between two reports of KV that is ready.

    frees_windows: the caller's BlockPool has `engine.kv.slots`, and its leases slide: see
    max_window_slots.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    layer_group_size: int = 4
    frees_windows: bool = False


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """device: cpu, cuda or cuda:N. num_threads: of all ranks together; None: torch's default."""

    device: str = "cpu"
    num_threads: int | None = None
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters of at most max_rank. modules: folders by the name that slices ask for."""

    modules: Mapping[str, str] = field(default_factory=dict)
    max_rank: int = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """graphs: what records decode steps, which needs Triton's kernels; None: all steps run eagerly,
    as those of transformers' models always do. draft_head: memory is left for it."""

    model: ModelChoice
    cache: CacheConfig = CacheConfig()
    limits: StepLimits = StepLimits()
    device: DeviceConfig = DeviceConfig()
    lora: LoraConfig = LoraConfig()
    graphs: Graphs | None = None
    draft_head: HeadFiles | None = None
