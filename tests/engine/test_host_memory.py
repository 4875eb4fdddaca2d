"""What a process may still take of the machine's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.host_memory import available_memory_bytes


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max", "5", 4096), ("1000", "400", 600), ("1000", "1400", 0), ("9999999", "0", 4096)],
)
def test_the_smaller_of_kernel_and_control_group_counts(
    limit: str, used: str, expected: int, tmp_path: Path
) -> None:
    files = {"meminfo": "MemTotal: 9 kB\nMemAvailable:  4 kB\n", "limit": limit, "used": used}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = (tmp_path / name for name in files)
    assert available_memory_bytes(*paths) == expected


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 7 kB\n")
    assert available_memory_bytes(meminfo, tmp_path / "no", tmp_path / "no") == 7 * 1024
