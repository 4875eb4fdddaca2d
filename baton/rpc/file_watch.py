"""What is made of files, and made anew once they have changed: certificates are renewed while a
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
    """Thread-safe. Files are looked at when something is asked for, not in between."""

    def __init__(self, paths: Sequence[PathLike], make: Callable[[], T]) -> None:
        """make: reads the files. Raises ConfigError, as it does."""
        self._paths = paths
        self._make = make
        self._lock = threading.Lock()
        self._stamp = _stamp_of(paths)
        self._value = make()

    def current(self) -> T:
        """Of the files as they are. What cannot be used is logged once, and the last that
        could stays."""
        self.renewed()
        with self._lock:
            return self._value

    def renewed(self) -> T | None:
        """As `current` if the files have changed since anything was asked for; None if not, or if
        they cannot be used."""
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
    """Changes when a file is written, or another takes its place."""
    return tuple(map(_file_stamp, paths))


def _file_stamp(path: PathLike) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)
