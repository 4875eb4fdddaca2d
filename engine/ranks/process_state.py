"""What the kernel says of a process of this host."""

from __future__ import annotations

from pathlib import Path

#: States of a process that is neither stopped, nor dead: see proc_pid_stat(5).
_RUNNING = frozenset("RSDI")


def is_running(pid: int) -> bool:
    """Whether a process runs, or would if it had a turn. False where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name, in brackets, may have any characters.
    return stat.rpartition(")")[2].split()[0] in _RUNNING
