"""Start-up parameters of a rank's process, passed as one line of JSON."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import TypeAdapter

from baton.types import DTYPE_BYTES, KvLayout
from engine.families.config import ModelConfig
from engine.families.overrides import ConfigOverrides
from engine.kv.part import KvPart
from engine.kv.tensors.ranks import PoolSize
from engine.kv.tensors.state_memory import state_bytes
from engine.ranks.expert_load import PerExpert
from engine.ranks.mesh import Degrees, Place, Stage
from engine.shard import Shard

_MIN_STAGING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Recording:
    """Decode steps to record as graphs: of up to max_graph_tokens new tokens, in sequences of up to
    max_len tokens. max_seqs: sequences of any step."""

    max_graph_tokens: int
    max_seqs: int
    max_len: int


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """Sizes of a model that another library's code runs, and changes of its config.json."""

    hidden_size: int
    overrides: ConfigOverrides


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Equal for all ranks of an engine, except for `rank`.

    backend: a name of BACKENDS. folder: of the checkpoint. config: parsed config.json, passed
    because parsing would import transformers; a ForeignConfig is for the module `code`. dtype: of
    weights. pools: see pool_sizes. device: of rank 0; those of the others on a host follow it.
    num_threads: of this rank. staging_bytes: see `part_bytes`. max_num_rows: states of all launches
    in flight. experts: see Shard. recording: decode steps that all ranks record; None: all run op
    by op. num_nodes: hosts. batch_invariant: see EnginePlan.

    kv_fd, meeting_fd: inherited segments, for pools (see kv_pool) and for SharedRanks; -1 without.
    host: this rank's address for exchanges over a network. store: host and port of the store of
    torch.distributed; unset with other backends.

    kv_service: module with `serve(link, make_pool, host, marks)`, which sends and receives the
    rank's KV; empty if rank 0 reaches all KV in shared memory.

    code: module with `load_rank`, see engine.follower. num_state_slots: of the states, which
    lie behind the pools in shared memory; 0 without. parts: of the model's KV, by rank.
    """

    rank: int
    degrees: Degrees
    backend: str
    folder: str
    config: ModelConfig | ForeignConfig
    dtype: str
    pools: tuple[PoolSize, ...]
    num_threads: int
    staging_bytes: int
    max_num_rows: int = 1
    experts: PerExpert = ()
    recording: Recording | None = None
    num_nodes: int = 1
    batch_invariant: bool = False
    device: str = "cpu"
    kv_fd: int = -1
    meeting_fd: int = -1
    host: str = "127.0.0.1"
    store: tuple[str, int] = ("", 0)
    kv_service: str = ""
    code: str = "engine.native_rank"
    num_state_slots: int = 0
    parts: tuple[KvPart, ...] = ()

    @property
    def needs_own_kv(self) -> bool:
        """Whether ranks that send their own KV cannot share memory, on one host either: a pool of
        all has all states as one, and the KV of a context once."""
        is_context = self.degrees.context > 1 and not self.degrees.by_sequence
        return bool(self.kv_service) and (is_context or any(part.num_states for part in self.parts))

    @property
    def has_own_kv(self) -> bool:
        """Whether each rank has its KV, and its layers' states, in memory of its own."""
        return self.kv_fd < 0

    @property
    def meets_in_steps(self) -> bool:
        """Whether the ranks have met in a step, in host memory, before rank 0 sends a message about
        the KV that it wrote. Ranks of a context do not meet in a step that each runs as a whole."""
        is_apart = self.has_own_kv and self.degrees.context > 1
        return self.torch_device.type == "cpu" and not is_apart

    @property
    def states_layout(self) -> KvLayout:
        """A layout with the layers whose states the rank has in memory: its own, or all."""
        layout = self.pools[0].layout
        return self.parts[self.rank].layout(layout) if self.has_own_kv else layout

    @property
    def memory_bytes(self) -> list[int]:
        """Bytes of each pool of all ranks, and of all states: the parts of shared memory."""
        states = state_bytes(self.pools[0].layout, self.num_state_slots)
        return [*(sum(pool.rank_bytes) for pool in self.pools), states]

    @property
    def place(self) -> Place:
        return self.degrees.place(self.rank)

    @property
    def shard(self) -> Shard:
        """The rank's part of each of its layers."""
        degrees, place = self.degrees, self.place
        holder = place.context_rank if degrees.by_sequence else None
        return Shard(place.tensor_rank, degrees.tensor, self.experts, degrees.cut, holder)

    @property
    def context_shard(self) -> Shard:
        """The rank's number among the ranks of its context."""
        return Shard(self.place.context_rank, self.degrees.context)

    @property
    def stage(self) -> Stage:
        """The rank's layers."""
        return Stage(self.place.stage, self.degrees.pipeline)

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The ranks of this rank's ring, by stage."""
        return next(ring for ring in self.degrees.pipelines() if self.rank in ring)

    @property
    def previous_rank(self) -> int:
        """The rank that sends its states to this one."""
        return self.pipeline[self.place.stage - 1]

    @property
    def state_bytes(self) -> int:
        """Bytes of a token's hidden state."""
        return self.config.hidden_size * DTYPE_BYTES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        """Where this rank computes."""
        first = torch.device(self.device)
        if first.type == "cpu":
            return first
        local_rank = self.rank % (self.degrees.num_ranks // self.num_nodes)
        return torch.device(first.type, (first.index or 0) + local_rank)

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.degrees.num_ranks}"

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that the rank's process inherits."""
        return tuple(fd for fd in (self.kv_fd, self.meeting_fd) if fd >= 0)

    def to_line(self) -> bytes:
        return _LINES.dump_json(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> RankSpec:
        return _LINES.validate_json(line)


_LINES = TypeAdapter(RankSpec)


def part_bytes(num_columns: int, size: int, element_bytes: int) -> int:
    """Bytes for a rank's part of a row of so many columns, of `size` ranks, in whole pages."""
    own_bytes = element_bytes * (-(-num_columns // size) + 4)
    return max(_MIN_STAGING_BYTES, -(-own_bytes // 4096) * 4096)


def staging_bytes(config: ModelConfig, size: int, dtype: str) -> int:
    """Bytes for a rank's part of the widest row that a tensor-parallel group of `size` ranks, or
    those of a context, exchange, in whole pages."""
    hidden_bytes = DTYPE_BYTES[dtype] * config.hidden_size
    widest = max(config.intermediate_size, config.num_heads * config.head_dim)
    part_bytes = max(DTYPE_BYTES[dtype] * widest, 4 * config.vocab_size) // size + 4
    row_bytes = max(hidden_bytes, part_bytes)
    return max(_MIN_STAGING_BYTES, -(-row_bytes // 4096) * 4096)
