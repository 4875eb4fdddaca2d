"""A folder as a tier: one file of equal slots, one record each, least recently used ones replaced
first.

    DIR/lock    held while a worker uses the folder
    DIR/secret  32 random bytes: keys and seals of the records
    DIR/blocks  slots: serial number of the write, length of the record, the record, unused bytes

The file outlives the worker. At the next start the heads of all slots are read, not the KV: a slot
without a sealed head of this very format, model, layout and numerics class is empty. What a crash
or a disk did to the KV itself shows in the record's digest when it is read. So nothing has to be
flushed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Final, Protocol

from baton.errors import ConfigError
from engine.kv.tiers.interface import Evicted, Record, TierFailed

_SLOT = struct.Struct("<QQ")
_EMPTY: Final = bytes(_SLOT.size)
#: Slots begin at multiples of this.
_ALIGNMENT = 4096
_SECRET_BYTES = 32


class SlotFile(Protocol):
    """The part of a file that the tier uses. All methods raise OSError; reads may be short."""

    def read(self, num_bytes: int, offset: int) -> bytes: ...

    def write(self, data: Sequence[Record], offset: int) -> int:
        """Write buffers one after another. Returns the number of bytes written."""
        ...

    def num_bytes(self) -> int: ...

    def cool(self, offsets: Sequence[int], num_bytes: int) -> None:
        """Drop what the operating system caches of these ranges."""
        ...

    def truncate(self, num_bytes: int) -> None: ...

    def close(self) -> None: ...


class _OsFile:
    """Implements SlotFile."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read(self, num_bytes: int, offset: int) -> bytes:
        return os.pread(self._fd, num_bytes, offset)

    def write(self, data: Sequence[Record], offset: int) -> int:
        return os.pwritev(self._fd, data, offset)

    def num_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def cool(self, offsets: Sequence[int], num_bytes: int) -> None:
        os.fdatasync(self._fd)  # what is not written yet stays cached
        for offset in offsets:
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def truncate(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, num_bytes)

    def close(self) -> None:
        os.close(self._fd)


OpenSlotFile = Callable[[Path], SlotFile]


class TierFolder:
    """A locked folder, before the format of its records is known. Raises ConfigError if it cannot
    be used, or another worker uses it."""

    def __init__(self, path: Path, open_file: OpenSlotFile = _OsFile) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            fix = f"{error.strerror}; give a folder that this process can write"
            raise ConfigError.of("--kv-disk-dir", path, fix) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_owner()
            self.secret = self._read_secret()
            self.file = open_file(path / "blocks")
        except OSError as error:
            os.close(self._lock)
            fix = f"{error.strerror}; give a folder that this process can write"
            if isinstance(error, BlockingIOError):
                fix = "another worker uses this folder; give each worker its own"
            raise ConfigError.of("--kv-disk-dir", path, fix) from None

    def _check_owner(self) -> None:
        """Raises ConfigError for files that another user could have filled with KV."""
        for name in ("secret", "blocks"):
            path = self.path / name
            if path.exists() and path.stat().st_uid != os.geteuid():
                os.close(self._lock)
                fix = f"{name} belongs to another user; give a folder of this process' user"
                raise ConfigError.of("--kv-disk-dir", self.path, fix)

    def close(self) -> None:
        """Close the file and give up the lock."""
        self.file.close()
        os.close(self._lock)

    def _read_secret(self) -> bytes:
        path = self.path / "secret"
        found = path.read_bytes() if path.exists() else b""
        if len(found) == _SECRET_BYTES:
            return found
        # None, or one that a crash has cut short: records under it are lost.
        made = secrets.token_bytes(_SECRET_BYTES)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(made)
        return made


class DiskTier:
    """Implements engine.kv.tiers.interface.Tier."""

    name: ClassVar[str] = "disk"
    is_shared: ClassVar[bool] = False

    def __init__(
        self,
        folder: TierFolder,
        max_num_bytes: int,
        max_record_bytes: int,
        head_bytes: int,
        key_of: Callable[[bytes], bytes | None],
    ) -> None:
        """Takes over the folder, and finds what an earlier worker left. max_record_bytes,
        head_bytes, key_of: see RecordFormat. Raises ConfigError if max_num_bytes holds no record,
        or the file cannot be read."""
        whole = _SLOT.size + max_record_bytes
        self._slot_bytes = -(-whole // _ALIGNMENT) * _ALIGNMENT
        num_slots = max_num_bytes // self._slot_bytes
        if not num_slots:
            fix = f"a block of this model takes {self._slot_bytes} bytes; give more"
            raise ConfigError.of("--kv-disk-bytes", max_num_bytes, fix)
        self._folder, self._file = folder, folder.file
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """Slot by key, least recently used first."""
        self._lock = threading.Lock()
        """Guards the dict: `touch` moves entries from another thread."""
        self._last_serial = 0
        try:
            self._find_records(num_slots, head_bytes, key_of)
        except OSError as error:
            fix = f"{error.strerror}; give a folder on a disk that works"
            raise ConfigError.of("--kv-disk-dir", folder.path, fix) from None
        used = set(self._slots.values())
        self._free = deque(slot for slot in range(num_slots) if slot not in used)

    @property
    def num_bytes(self) -> int:
        return len(self._slots) * self._slot_bytes

    def has(self, key: bytes) -> bool:
        return key in self._slots

    def touch(self, key: bytes) -> None:
        with self._lock:
            if key in self._slots:
                self._slots.move_to_end(key)

    def put(self, key: bytes, record: Record) -> Sequence[Evicted]:
        evicted: list[Evicted] = []
        with self._lock:
            slot = self._slots.pop(key, None)
            if slot is None and self._free:
                slot = self._free.popleft()
            elif slot is None:
                oldest, slot = self._slots.popitem(last=False)
                evicted.append(Evicted(oldest, None))
        self._last_serial += 1
        prefix = _SLOT.pack(self._last_serial, len(record))
        try:
            num_written = self._file.write((prefix, record), slot * self._slot_bytes)
        except OSError as error:
            raise TierFailed(f"a write failed: {error.strerror}") from error
        if num_written < len(prefix) + len(record):
            raise TierFailed("a write was cut short: the disk is full")
        with self._lock:
            self._slots[key] = slot
        return evicted

    def get(self, keys: Sequence[bytes]) -> Sequence[Record | None]:
        return [self._read(key) for key in keys]

    def remove(self, key: bytes) -> None:
        with self._lock:
            slot = self._slots.pop(key, None)
        if slot is None:
            return
        self._free.append(slot)
        try:
            self._file.write((_EMPTY,), slot * self._slot_bytes)
        except OSError as error:
            raise TierFailed(f"a write failed: {error.strerror}") from error

    def cool(self, keys: Sequence[bytes]) -> None:
        slots = [slot for key in keys if (slot := self._slots.get(key)) is not None]
        try:
            self._file.cool([slot * self._slot_bytes for slot in slots], self._slot_bytes)
        except OSError as error:
            raise TierFailed(f"a write failed: {error.strerror}") from error

    def close(self) -> None:
        self._folder.close()

    def _read(self, key: bytes) -> Record | None:
        slot = self._slots.get(key)
        if slot is None:
            return None
        try:
            data = memoryview(self._file.read(self._slot_bytes, slot * self._slot_bytes))
        except OSError as error:
            raise TierFailed(f"a read failed: {error.strerror}") from error
        num_bytes = _SLOT.unpack_from(data)[1] if len(data) >= _SLOT.size else 0
        return data[_SLOT.size : _SLOT.size + num_bytes]

    def _find_records(
        self, num_slots: int, head_bytes: int, key_of: Callable[[bytes], bytes | None]
    ) -> None:
        """Read the heads of all slots; cut off slots beyond num_slots. The later of two records of
        one key counts. Raises OSError."""
        if self._file.num_bytes() > num_slots * self._slot_bytes:
            self._file.truncate(num_slots * self._slot_bytes)
        found: dict[bytes, tuple[int, int]] = {}
        for slot in range(-(-self._file.num_bytes() // self._slot_bytes)):
            head = self._file.read(_SLOT.size + head_bytes, slot * self._slot_bytes)
            serial, num_bytes = _SLOT.unpack_from(head) if len(head) >= _SLOT.size else (0, 0)
            key = key_of(head[_SLOT.size :]) if num_bytes else None
            if key is not None:
                found[key] = max(found.get(key, (0, 0)), (serial, slot))
        for key, (serial, slot) in sorted(found.items(), key=lambda item: item[1]):
            self._slots[key], self._last_serial = slot, serial
