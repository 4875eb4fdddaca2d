"""Values built from files and rebuilt when the files change: certificates are renewed while a
process runs."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from baton.errors import ConfigError

_log = logging.getLogger(__name__)

T = TypeVar("T")
PathLike = str | os.PathLike[str]
Stamp = tuple[tuple[int, int, int] | None, ...]


class MadeOfFiles(Generic[T]):
    """Caches a value built from files. Thread-safe. The files are checked at each access only."""

    def __init__(self, paths: Sequence[PathLike], make: Callable[[], T]) -> None:
        """make: reads the files. Raises ConfigError if `make` does."""
        self._paths = paths
        self._make = make
        self._lock = threading.Lock()
        self._stamp = _stamp_of(paths)
        self._value = make()

    def current(self) -> T:
        """The value for the current files. If they are unusable, the error is logged once and the
        last value kept."""
        self.renewed()
        with self._lock:
            return self._value

    def renewed(self) -> T | None:
        """The new value if the files have changed since the last access; None if not, or if they
        are unusable."""
        with self._lock:
            stamp = _stamp_of(self._paths)
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            try:
                self._value = self._make()
            except ConfigError as error:
                _log.warning("certificates are kept as they were: %s", error.message)
                return None
            _log.info("certificates were read anew")
            return self._value


def _stamp_of(paths: Sequence[PathLike]) -> Stamp:
    """A stamp that changes when a file is written or replaced."""
    return tuple(map(_file_stamp, paths))


def _file_stamp(path: PathLike) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)
