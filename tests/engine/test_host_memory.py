"""What a process may still take of the machine's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.host_memory import HostBudget, MemoryFiles, available_memory_bytes, host_budget

V1 = {
    "limit": "memory.limit_in_bytes",
    "used": "memory.usage_in_bytes",
    "unused": "total_inactive_file",
}
V2 = {"limit": "memory.max", "used": "memory.current", "unused": "inactive_file"}


def linux(tmp_path: Path, groups: str, meminfo: str = "MemAvailable:  4 kB\n") -> MemoryFiles:
    files = MemoryFiles(*(tmp_path / name for name in ("meminfo", "groups", "v2", "v1")))
    files.meminfo.write_text("MemTotal: 9 kB\n" + meminfo)
    files.groups.write_text(groups)
    return files


def group(folder: Path, names: dict[str, str], limit: str, used: str, unused: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names["limit"]).write_text(limit + "\n")
    (folder / names["used"]).write_text(used + "\n")
    (folder / "memory.stat").write_text(f"cache 7\n{names['unused']} {unused}\n")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limit", "used", "unused", "expected"),
    [
        ("1000", "400", 0, 600),
        ("1000", "400", 100, 700),
        ("1000", "1400", 0, 0),
        ("9999999", "0", 0, 4096),
    ],
)
def test_the_smaller_of_kernel_and_control_group_counts(
    version: int, limit: str, used: str, unused: int, expected: int, tmp_path: Path
) -> None:
    files = linux(tmp_path, "0::/a\n" if version == 2 else "5:cpu:/\n4:memory:/a\n0::/\n")
    mount, names = (files.mount_v2, V2) if version == 2 else (files.mount_v1, V1)
    group(mount / "a", names, limit, used, unused)
    assert available_memory_bytes(files) == expected


def test_a_group_without_a_limit_has_that_of_its_parent(tmp_path: Path) -> None:
    files = linux(tmp_path, "0::/pod/container\n")
    group(files.mount_v2 / "pod" / "container", V2, "max", "5")
    group(files.mount_v2 / "pod", V2, "900", "400")
    assert available_memory_bytes(files) == 500


def test_in_a_container_the_mount_is_its_own_group(tmp_path: Path) -> None:
    files = linux(tmp_path, "4:memory:/docker/0123\n")
    group(files.mount_v1, V1, "900", "300")
    assert available_memory_bytes(files) == 600


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    files = linux(tmp_path, "", "MemAvailable: 7 kB\n")
    assert available_memory_bytes(files) == 7 * 1024
    files.groups.unlink()
    assert available_memory_bytes(files) == 7 * 1024


@pytest.mark.parametrize(
    ("pending", "expected"),
    [(0, HostBudget(2048, 512)), (1000, HostBudget(2048, 387)), (3000, HostBudget(1096, 137))],
)
def test_what_others_have_planned_is_not_planned_again(
    pending: int, expected: HostBudget, tmp_path: Path
) -> None:
    assert host_budget(0.5, pending, linux(tmp_path, "")) == expected
