"""Available memory of this machine."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def available_memory_bytes(
    meminfo: Path = _MEMINFO, limit: Path = _CGROUP_LIMIT, used: Path = _CGROUP_USED
) -> int:
    """Host memory, in bytes, still available to this process: free memory, limited by its control
    group."""
    free = _meminfo_available(meminfo)
    if limit.is_file() and used.is_file():
        text = limit.read_text().strip()
        if text != "max":
            free = min(free, max(0, int(text) - int(used.read_text())))
    return free


def _meminfo_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{meminfo} names no MemAvailable")
