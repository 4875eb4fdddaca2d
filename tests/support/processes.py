"""Processes of this machine, read from /proc while others of them end."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def command_of(pid: int) -> bytes:
    """Command line of a process; empty if it has ended."""
    # A process that ends while it is read: ESRCH.
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def child_pids(pid: int) -> list[int]:
    """Children that any thread of a process started; threads that end meanwhile are passed over."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def rank_pids(pid: int | None = None) -> list[int]:
    """Ranks that a process, this one by default, has started, without its other children."""
    return [
        child for child in child_pids(pid or os.getpid()) if b"engine.follow" in command_of(child)
    ]


def pids_of(text: str) -> list[int]:
    """Other processes that have `text` on their command lines and have not ended."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if pid != os.getpid() and text.encode() in command_of(pid)]
