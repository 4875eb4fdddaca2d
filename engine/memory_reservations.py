"""Memory that workers of this machine have planned but not touched yet, so that workers which start
together do not each count it as free."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Self

_log = logging.getLogger(__name__)


class Reservation:
    """Bytes planned by this process: a file that others read, locked as long as it counts."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._finalizer = weakref.finalize(self, _release, path, descriptor)

    def close(self) -> None:
        self._finalizer()


class Reservations:
    """Reservations of this user's workers, one file each, named PID-RANDOM.

    Not seen: workers of other users, and of containers that do not share the folder.
    """

    def __init__(self, folder: Path, proc: Path = Path("/proc")) -> None:
        """folder: private to the user; made if it is not there. proc: of processes. Raises OSError
        if the folder cannot be used."""
        self._folder, self._proc = folder, proc
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)

    @classmethod
    def of_user(cls) -> Self:
        """Raises OSError, as if no folder for temporary files can be written."""
        return cls(Path(tempfile.gettempdir(), f"baton-memory-{os.getuid()}"))

    def __enter__(self) -> Self:
        """Exclude others until the end, from `pending_bytes` to `reserve`."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def pending_bytes(self) -> int:
        """Bytes that living processes have planned and not touched. Removes files of dead ones, and
        skips what is no reservation."""
        planned, before = Counter[int](), dict[int, int]()
        for path in self._folder.glob("*-*"):
            try:
                if _is_released(path):
                    path.unlink(missing_ok=True)
                    continue
                pid = int(path.name.partition("-")[0])
                num_bytes, touched = map(int, path.read_text().split())
            except (OSError, ValueError) as error:
                _log.warning("%s is no reservation of memory: %r; remove it", path, error)
                continue
            planned[pid] += num_bytes
            before[pid] = min(touched, before.get(pid, touched))
        return sum(
            max(0, num_bytes - max(0, self._touched(pid) - before[pid]))
            for pid, num_bytes in planned.items()
        )

    def reserve(self, num_bytes: int) -> Reservation:
        """Record that this process and its children are about to touch so many bytes more. Raises
        OSError if nothing can be written."""
        descriptor, name = tempfile.mkstemp(prefix=f"{os.getpid()}-", dir=self._folder)
        # Made first, because it removes the file if nothing can be written.
        reservation = Reservation(Path(name), descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, f"{num_bytes} {self._touched(os.getpid())}".encode())
        return reservation

    def _touched(self, pid: int) -> int:
        """Bytes that a process and its children have, without those of files; 0 if it has ended."""
        total = 0
        with suppress(OSError):
            for line in (self._proc / str(pid) / "status").read_text().splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    total += int(line.split()[1]) * 1024
            for children in (self._proc / str(pid) / "task").glob("*/children"):
                with suppress(OSError):  # a thread that has just ended
                    total += sum(map(self._touched, map(int, children.read_text().split())))
        return total


def _is_released(path: Path) -> bool:
    """Whether its process has ended, or closed it."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True


def _release(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)
