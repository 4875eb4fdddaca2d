"""Start-up parameters of a rank's process, passed as one line of JSON."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from baton.types import DTYPE_BYTES
from engine.families.config import ModelConfig
from engine.kv.tensors.ranks import PoolSize
from engine.shard import Shard

_MIN_STAGING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Equal for all ranks of an engine, except for `rank`.

    folder: of the checkpoint. config: parsed config.json, passed because parsing would import
    transformers. dtype: of weights. pools: see pool_sizes. num_threads: of this rank. kv_fd,
    meeting_fd: inherited segments, for pools (see kv_pool) and for SharedRanks.
    """

    rank: int
    size: int
    folder: str
    config: ModelConfig
    dtype: str
    pools: tuple[PoolSize, ...]
    max_model_len: int
    num_threads: int
    staging_bytes: int
    kv_fd: int
    meeting_fd: int

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, self.size)

    def to_line(self) -> bytes:
        return _LINES.dump_json(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> RankSpec:
        return _LINES.validate_json(line)


_LINES = TypeAdapter(RankSpec)


def staging_bytes(config: ModelConfig, size: int, dtype: str) -> int:
    """Bytes for a rank's part of the widest row that ranks exchange, in whole pages."""
    widest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    row_bytes = max(DTYPE_BYTES[dtype] * widest, 4 * config.vocab_size) // size + 4
    return max(_MIN_STAGING_BYTES, -(-row_bytes // 4096) * 4096)
