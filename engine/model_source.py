"""What load_engine asks of a checkpoint, no matter which code runs its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from baton.types import KvLayout
from baton_kernels.attention_backends import REFERENCE, AttentionBackend
from engine.checkpoint import HeadFiles
from engine.cuda.graph_device import GraphDevice
from engine.memory_plan import HeadMemory
from engine.ranks.followers import Followers, TensorPool
from engine.torch.adapters import Adapter
from engine.torch.step_runner import StepRunner
from engine.torch.weights import ProgressHook


@dataclass(frozen=True, slots=True)
class Graphs:
    """What records decode steps, and the most sequences of one."""

    make: Callable[[torch.device], GraphDevice]
    max_seqs: int


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What is settled before a model is loaded. dtype: of weights and of what is computed; layout:
    of the whole model's KV, without a fingerprint; max_len: in tokens; max_seqs: sequences of a
    step; num_window_slots: see MemoryPlan; adapters: by name; attention: who computes it;
    batch_invariant: no row's result depends on which others are computed with it."""

    device: torch.device
    dtype: str
    layout: KvLayout
    num_blocks: int
    max_len: int
    num_ranks: int
    max_seqs: int
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    attention: AttentionBackend = REFERENCE
    batch_invariant: bool = False
    num_window_slots: int = 0


class ModelSource(Protocol):
    """A checkpoint. Nothing is loaded before `load`.

    name: of the family or architecture, for people; dtype: the checkpoint's; max_len: of a
    sequence, in tokens, unless another is asked for; longest_len: the most that may be;
    num_kv_heads, head_dim, kv_parts: see KvLayout; windows: tokens that each
    layer attends to, None for all; takes_grouped_kv: whether layers run over a GroupedKvPool;
    num_state_layers, state_layer_bytes: see KvLayout;
    kv_digest: of every setting on which the meaning of KV depends, but the weights; kernels: whose
    results a token depends on, besides Baton's.
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def kv_parts(self) -> tuple[str, ...]: ...

    @property
    def windows(self) -> tuple[int | None, ...]: ...

    @property
    def num_state_layers(self) -> int: ...

    @property
    def state_layer_bytes(self) -> int: ...

    @property
    def takes_grouped_kv(self) -> bool: ...

    @property
    def max_len(self) -> int: ...

    @property
    def longest_len(self) -> int: ...

    def for_length(self, max_model_len: int) -> ModelSource:
        """The same for sequences up to that, on which the meaning of KV may depend."""
        ...

    @property
    def kv_digest(self) -> str: ...

    @property
    def kernels(self) -> str: ...

    def check_ranks(self, size: int, device: torch.device) -> None:
        """Raise ConfigError unless so many ranks can share the model on this kind of device."""
        ...

    def choose_attention(
        self, name: str, dtype: str, kv_dtype: str, device: torch.device
    ) -> AttentionBackend:
        """See engine.attention_choice."""
        ...

    def check_batch_invariant(self, dtype: str, device: torch.device) -> None:
        """See engine.attention_choice."""
        ...

    def read_adapter(
        self, folder: Path, dtype: str, device: torch.device, max_rank: int
    ) -> Adapter:
        """A LoRA adapter of this model. Raises AdapterError."""
        ...

    def weight_bytes(self, dtype: str, device: torch.device, num_ranks: int) -> int:
        """What a rank's weights take."""
        ...

    def activation_bytes(self, dtype: str, num_tokens: int, num_seqs: int, max_len: int) -> int:
        """An upper estimate of what a step holds at once."""
        ...

    def graph_bytes(self, plan: EnginePlan, graphs: Graphs | None) -> int:
        """About what recorded steps take; 0 where none are."""
        ...

    def head_memory(self, files: HeadFiles, dtype: str, block_size: int) -> HeadMemory:
        """What a draft head of this model takes. Raises ConfigError, ModelError."""
        ...

    def load(self, plan: EnginePlan, progress: ProgressHook | None) -> LoadedModel:
        """Read the weights. Raises ModelError."""
        ...


class LoadedModel(Protocol):
    """Weights that are read. followers: see StepRunner; shared_prompt_limit: see EngineSpec."""

    @property
    def digest(self) -> str: ...

    @property
    def followers(self) -> Followers: ...

    @property
    def shared_prompt_limit(self) -> int | None: ...

    def steps(self, pool: TensorPool, graphs: Graphs | None) -> StepRunner:
        """Steps over `pool`."""
        ...
