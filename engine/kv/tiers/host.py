"""Host memory as a tier: records in a dict, least recently used ones given up first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from baton.errors import ConfigError
from engine.kv.tiers.interface import Evicted, Record


class HostTier:
    """Implements engine.kv.tiers.interface.Tier. Records are kept as they come, not copied."""

    name: ClassVar[str] = "host"
    is_shared: ClassVar[bool] = False

    def __init__(self, max_num_bytes: int, max_record_bytes: int) -> None:
        """Raises ConfigError if not even one record fits."""
        if max_num_bytes < max_record_bytes:
            fix = f"a block of this model takes {max_record_bytes} bytes; give more"
            raise ConfigError.of("--kv-host-bytes", max_num_bytes, fix)
        self._max_num_bytes = max_num_bytes
        self._records: OrderedDict[bytes, Record] = OrderedDict()
        self._lock = threading.Lock()
        """Guards the dict: `touch` moves entries from another thread."""
        self.num_bytes = 0

    def has(self, key: bytes) -> bool:
        return key in self._records

    def touch(self, key: bytes) -> None:
        with self._lock:
            if key in self._records:
                self._records.move_to_end(key)

    def put(self, key: bytes, record: Record) -> Sequence[Evicted]:
        evicted = []
        with self._lock:
            self._drop(key)
            self._records[key] = record
            self.num_bytes += len(record)
            while self.num_bytes > self._max_num_bytes:
                oldest = next(iter(self._records))
                evicted.append(Evicted(oldest, self._drop(oldest)))
        return evicted

    def get(self, keys: Sequence[bytes]) -> Sequence[Record | None]:
        return [self._records.get(key) for key in keys]

    def remove(self, key: bytes) -> None:
        with self._lock:
            self._drop(key)

    def cool(self, keys: Sequence[bytes]) -> None:
        """Nothing is faster than host memory."""

    def close(self) -> None:
        self._records.clear()
        self.num_bytes = 0

    def _drop(self, key: bytes) -> Record | None:
        record = self._records.pop(key, None)
        self.num_bytes -= len(record) if record is not None else 0
        return record
