"""Ranks that send and receive their own KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.kv.interface import KvPool
from engine.kv.part import KvPart


class RankLink(Protocol):
    """A connection to another rank's process; see engine.ranks.link."""

    def handle(self, kind: int, handler: Callable[[bytes], None]) -> None: ...

    def send(self, kind: int, payload: bytes = b"") -> None: ...


@dataclass(frozen=True, slots=True)
class KvRanks:
    """parts: of the model's KV, by rank. pool: rank 0's. links: to ranks 1, 2, ..., each with a
    service for its KV, see engine.ranks.rank_spec."""

    parts: tuple[KvPart, ...]
    pool: KvPool
    links: Sequence[RankLink]
