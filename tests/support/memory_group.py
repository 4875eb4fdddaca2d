"""A control group of bounded memory, of version 1 or 2, for processes of a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class MemoryGroup:
    """Processes started by `command` are killed by the kernel beyond `limit_bytes` together."""

    def __init__(self, folder: Path, limit_bytes: int, *, is_v2: bool) -> None:
        self._folder = folder
        self._used, limit, self._events = (
            ("memory.current", "memory.max", "memory.events")
            if is_v2
            else ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control")
        )
        (folder / limit).write_text(str(limit_bytes))

    def command(self, *command: str) -> list[str]:
        return ["sh", "-c", f'echo $$ > {self._folder}/cgroup.procs && exec "$0" "$@"', *command]

    @property
    def used_bytes(self) -> int:
        return int((self._folder / self._used).read_text())

    @property
    def num_killed(self) -> int:
        lines = (self._folder / self._events).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Skip the test, with its reason, where no such group can be made."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    mount = v1 if v1.is_dir() else v2
    folder = mount / f"baton-test-{os.getpid()}"
    try:
        folder.mkdir()
        group = MemoryGroup(folder, limit_bytes, is_v2=mount is v2)
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no control group of bounded memory can be made here: {error}")
    try:
        yield group
    finally:
        folder.rmdir()
