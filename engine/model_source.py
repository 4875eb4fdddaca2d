"""Interface of load_engine to a checkpoint, independent of the code that runs its layers."""

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
from engine.kv.part import KvPart
from engine.memory_plan import HeadMemory
from engine.ranks.followers import Followers, TensorPool
from engine.ranks.mesh import Degrees
from engine.ranks.nodes import ONE_NODE, Nodes
from engine.torch.adapters import Adapter
from engine.torch.step_runner import StepRunner
from engine.torch.weights import ProgressHook


@dataclass(frozen=True, slots=True)
class Graphs:
    """Recorder of decode steps, and the maximum new tokens of one."""

    make: Callable[[torch.device], GraphDevice]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Settings chosen before a model is loaded.

    dtype: of weights and computation; layout: of the whole model, without a fingerprint; max_len:
    in tokens; max_seqs, max_tokens: sequences and tokens of all steps in flight; num_window_slots:
    see MemoryPlan; adapters: by name; attention: the backend; batch_invariant: each row's result is
    independent of the rest of the batch; degrees, backend, nodes, kv_service, expert_load_file: of
    the ranks, see DeviceConfig. graphs: None if all steps run op by op.
    """

    device: torch.device
    dtype: str
    layout: KvLayout
    num_blocks: int
    max_len: int
    degrees: Degrees
    max_seqs: int
    max_tokens: int = 1
    backend: str = "shm"
    nodes: Nodes = ONE_NODE
    kv_service: str = ""
    expert_load_file: Path | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    attention: AttentionBackend = REFERENCE
    batch_invariant: bool = False
    num_window_slots: int = 0
    graphs: Graphs | None = None


class ModelSource(Protocol):
    """A checkpoint. Nothing is loaded before `load`.

    name: family or architecture, for people. dtype: the checkpoint's. max_len: default maximum
    length of a sequence, in tokens; longest_len: its upper limit. num_kv_heads, head_dim, kv_parts,
    num_state_layers, state_layer_bytes: see KvLayout. windows: by layer, in tokens, None for full
    attention. takes_grouped_kv: whether layers support a GroupedKvPool. kv_digest: digest of all
    settings that define the meaning of KV, except the weights. kernels: versions of kernels outside
    Baton that tokens depend on.
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
        """The source for sequences of at most max_model_len tokens, which may change the meaning of
        KV."""
        ...

    @property
    def kv_digest(self) -> str: ...

    @property
    def kernels(self) -> str: ...

    def check_ranks(self, degrees: Degrees, device: torch.device) -> None:
        """Raise ConfigError unless ranks of these degrees can share the model on this kind of
        device."""
        ...

    def rank_parts(self, layout: KvLayout, degrees: Degrees) -> tuple[KvPart, ...]:
        """The part of the model's KV, and of its states, that each rank has."""
        ...

    def choose_attention(
        self, name: str, dtype: str, kv_dtype: str, device: torch.device, block_size: int
    ) -> AttentionBackend:
        """See engine.attention_choice."""
        ...

    def check_batch_invariant(self, dtype: str, device: torch.device) -> None:
        """See engine.attention_choice."""
        ...

    def read_adapter(
        self, folder: Path, dtype: str, device: torch.device, max_rank: int
    ) -> Adapter:
        """Read a LoRA adapter of this model. Raises AdapterError."""
        ...

    def weight_bytes(self, dtype: str, device: torch.device, degrees: Degrees) -> int:
        """Bytes of a rank's weights."""
        ...

    def activation_bytes(self, dtype: str, num_tokens: int, num_seqs: int, max_len: int) -> int:
        """Upper estimate of a step's bytes."""
        ...

    def graph_bytes(self, plan: EnginePlan) -> int:
        """Approximate bytes of recorded steps; 0 without recording."""
        ...

    def head_memory(self, files: HeadFiles, dtype: str, block_size: int) -> HeadMemory:
        """Memory of a draft head for this model. Raises ConfigError, ModelError."""
        ...

    def load(self, plan: EnginePlan, progress: ProgressHook | None) -> LoadedModel:
        """Read the weights. Raises ModelError."""
        ...


class LoadedModel(Protocol):
    """Loaded weights. followers: see StepRunner; shared_prompt_limit: see EngineSpec."""

    @property
    def digest(self) -> str: ...

    @property
    def followers(self) -> Followers: ...

    @property
    def shared_prompt_limit(self) -> int | None: ...

    def steps(self, pool: TensorPool) -> StepRunner:
        """The step runner over `pool`."""
        ...

    def close(self) -> None:
        """End the other ranks, and write EnginePlan.expert_load_file."""
        ...
