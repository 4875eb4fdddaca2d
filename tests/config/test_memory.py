"""The default size of KV memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.memory import (
    MAX_DEFAULT_KV_BYTES,
    available_memory_bytes,
    default_kv_cache_memory_bytes,
)


@given(available=st.integers(0, 2**50), num_workers=st.integers(1, 64))
def test_workers_together_take_a_quarter_at_most(available: int, num_workers: int) -> None:
    size = default_kv_cache_memory_bytes(available, num_workers)
    assert 0 <= size <= MAX_DEFAULT_KV_BYTES
    assert 4 * num_workers * size <= available


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
