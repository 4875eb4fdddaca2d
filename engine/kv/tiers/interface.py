"""A tier: a place outside the device that keeps records of full prefix blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

#: A record as bytes: see engine.kv.tiers.record.
Record = bytes | bytearray | memoryview


class TierFailed(Exception):
    """The tier cannot be used any more, for example because its disk is full; the message says
    why."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """A record that a tier gave up for another. record: None if the tier would have to read it."""

    key: bytes
    record: Record | None


class Tier(Protocol):
    """Records by key. `put`, `get`, `remove` and `cool` are called by one thread, the tier's own,
    and may wait for a device; the other methods by any thread, and return at once.

    All errors of a device are raised as TierFailed.
    """

    @property
    def name(self) -> str:
        """For logs, metrics and people; unique among kinds."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether other workers read and write it, so that only asking tells what it has."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the records; 0 if only others know."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether the tier is known to have this record."""
        ...

    def touch(self, key: bytes) -> None:
        """Mark a record, if it is there, as used: it is given up after those used before."""
        ...

    def put(self, key: bytes, record: Record) -> Sequence[Evicted]:
        """Keep a record, in place of an older one of this key. Returns what had to go for it, the
        record itself if it does not fit."""
        ...

    def get(self, keys: Sequence[bytes]) -> Sequence[Record | None]:
        """The records of these keys, None for each that is not there (any more)."""
        ...

    def remove(self, key: bytes) -> None:
        """Give up a record that turned out to be wrong."""
        ...

    def cool(self, keys: Sequence[bytes]) -> None:
        """Have the next read of these records take as long as one of records that have not been
        used for long: drop what the operating system keeps of them in memory."""
        ...

    def close(self) -> None:
        """Called once, when the tier's thread has ended; also after a failure."""
        ...
