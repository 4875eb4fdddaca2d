"""Available memory of this machine, within the process's control groups of either version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from engine.memory_plan import DEFAULT_PART


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """Where Linux reports memory: /proc/meminfo, the groups of this process, and the file systems
    of control groups, version 2 and version 1's of memory."""

    meminfo: Path = Path("/proc/meminfo")
    groups: Path = Path("/proc/self/cgroup")
    mount_v2: Path = Path("/sys/fs/cgroup")
    mount_v1: Path = Path("/sys/fs/cgroup/memory")


LINUX = MemoryFiles()


@dataclass(frozen=True, slots=True)
class HostBudget:
    """What a worker may plan with, in bytes: in all, and for KV by default."""

    available_bytes: int
    default_kv_bytes: int


def host_budget(share: float, pending_bytes: int = 0, files: MemoryFiles = LINUX) -> HostBudget:
    """share: of what is free (0..1). pending_bytes: of what is free, what others have planned."""
    free = available_memory_bytes(files)
    left = max(0, free - pending_bytes)
    return HostBudget(min(int(free * share), left), int(left * share) // DEFAULT_PART)


def available_memory_bytes(files: MemoryFiles = LINUX) -> int:
    """Host memory, in bytes, still available to this process: free memory, limited by its control
    group and each of that one's parents. Pages of files that were not used lately count as free."""
    return min(_meminfo_available(files.meminfo), *_group_bytes(files))


def _meminfo_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{meminfo} names no MemAvailable")


def _group_bytes(files: MemoryFiles) -> Iterator[int]:
    """Bytes left by each group's limit; at least one value."""
    yield 1 << 62
    lines = files.groups.read_text().splitlines() if files.groups.is_file() else ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = files.mount_v2, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = files.mount_v1
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = PurePosixPath(path).relative_to("/")
        # Within a container the mount may begin at its own group, where outer paths do not exist.
        for group in (inner, *inner.parents):
            if (left := _left(mount / group, *names)) is not None:
                yield left


def _left(group: Path, limit: str, used: str, unused_files: str) -> int | None:
    """Bytes left by one group's limit; None without one."""
    if not (group / limit).is_file() or (text := (group / limit).read_text().strip()) == "max":
        return None
    stat = group / "memory.stat"
    lines = stat.read_text().splitlines() if stat.is_file() else ()
    reclaimable = sum(int(line.split()[1]) for line in lines if line.startswith(f"{unused_files} "))
    return max(0, int(text) - int((group / used).read_text()) + reclaimable)
