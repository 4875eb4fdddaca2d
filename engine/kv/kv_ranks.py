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


class KvMarks(Protocol):
    """Marks of a rank's pool, by what rank 0 had sent it. Called in any thread."""

    def after(self, num_commands: int, num_layers: int = ...) -> object:
        """A mark (see KvPool.mark) after the first num_commands commands, of the last one only
        after num_layers of this rank's layers; None if nothing is to be waited for. Waits until
        these are launched, not until they are done."""
        ...


@dataclass(frozen=True, slots=True)
class KvRanks:
    """parts: of the model's KV, by rank. pool: rank 0's. links: to ranks 1, 2, ..., each with a
    service for its KV, see engine.ranks.rank_spec. num_commands: commands so far that a
    copy of KV has to follow; see KvMarks."""

    parts: tuple[KvPart, ...]
    pool: KvPool
    links: Sequence[RankLink]
    num_commands: Callable[[], int]
