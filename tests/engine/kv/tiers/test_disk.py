"""A folder as a tier: bounded, found again after a restart, and never wrong silently."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from engine.kv.prefix_index import BlockIdentity
from engine.kv.tiers.disk import DiskTier, TierFolder
from engine.kv.tiers.interface import Record, TierFailed
from engine.kv.tiers.record import BadRecord, record_key
from engine.oracle import OracleEngine, OracleOptions
from tests.support.kv_tiers import FaultyFile, disk_full, disk_tier, record_format

ENGINE = OracleEngine(OracleOptions(num_blocks=8, block_size=4))
FORM = record_format(ENGINE)


def identity(number: int) -> BlockIdentity:
    return BlockIdentity(number.to_bytes(32, "little"), bytes(32), bytes(16), b"")


def key(number: int) -> bytes:
    return record_key(identity(number), is_whole=True)


def record(number: int) -> bytes:
    packed = FORM.pack(ENGINE.kv, number % 8, identity(number), is_whole=True)
    FORM.seal(packed, identity(number), is_whole=True)
    return bytes(packed)


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return disk_tier(ENGINE, tmp_path, 4)


def is_right(found: Record | None, number: int) -> bool:
    """Whether a record can be opened; then it must be the right one."""
    try:
        FORM.open(found or b"", identity(number), needs_whole=True)
    except BadRecord:
        return False
    assert found == record(number)
    return True


def reopened(tier: DiskTier, path: Path, num_blocks: int = 4) -> DiskTier:
    tier.close()
    return disk_tier(ENGINE, path, num_blocks)


def test_the_least_recently_used_record_goes(tier: DiskTier, tmp_path: Path) -> None:
    for number in range(4):
        assert not tier.put(key(number), record(number))
    tier.touch(key(0))
    (evicted,) = tier.put(key(4), record(4))
    assert evicted.key == key(1)
    assert [tier.has(key(number)) for number in range(5)] == [True, False, True, True, True]
    assert tier.get([key(0), key(1), key(4)]) == [record(0), None, record(4)]
    assert tier.num_bytes == 4 * 4096
    assert (tmp_path / "blocks").stat().st_size <= 4 * 4096


def test_a_restart_finds_the_records_in_the_order_of_writing(
    tier: DiskTier, tmp_path: Path
) -> None:
    for number in (3, 1, 2):
        tier.put(key(number), record(number))
    tier.put(key(3), record(3))
    tier.remove(key(2))
    tier = reopened(tier, tmp_path)
    assert tier.get([key(1), key(2), key(3)]) == [record(1), None, record(3)]
    for number in (5, 6):
        assert not tier.put(key(number), record(number))
    (evicted,) = tier.put(key(7), record(7))
    assert evicted.key == key(1)


def test_a_smaller_bound_after_a_restart_holds(tier: DiskTier, tmp_path: Path) -> None:
    for number in range(4):
        tier.put(key(number), record(number))
    tier = reopened(tier, tmp_path, 2)
    assert tier.num_bytes == 2 * 4096
    assert (tmp_path / "blocks").stat().st_size <= 2 * 4096


@pytest.mark.parametrize("cut", [1, 4097, 8193])
def test_a_file_that_was_cut_short_loses_what_was_cut(
    tier: DiskTier, tmp_path: Path, cut: int
) -> None:
    for number in range(3):
        tier.put(key(number), record(number))
    tier.close()
    size = (tmp_path / "blocks").stat().st_size
    os.truncate(tmp_path / "blocks", size - cut)
    tier = disk_tier(ENGINE, tmp_path, 4)
    found = tier.get([key(number) for number in range(3)])
    num_right = {1: 2, 4097: 1, 8193: 0}[cut]
    assert [is_right(each, number) for number, each in enumerate(found)].count(True) == num_right


@pytest.mark.parametrize("content", [b"", b"x" * 20_000, os.urandom(20_000), bytes(20_000)])
def test_a_foreign_file_has_no_records(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "blocks").write_bytes(content)
    tier = disk_tier(ENGINE, tmp_path, 4)
    assert tier.num_bytes == 0
    tier.put(key(1), record(1))
    assert tier.get([key(1)]) == [record(1)]


def test_records_of_another_model_are_replaced(tier: DiskTier, tmp_path: Path) -> None:
    tier.put(key(1), record(1))
    tier.close()
    other = OracleEngine(OracleOptions(num_blocks=8, block_size=4, adapters=("red",)))
    tier = disk_tier(other, tmp_path, 4)
    assert tier.num_bytes == 0
    assert tier.get([key(1)]) == [None]


def test_one_worker_at_a_time_uses_a_folder(tier: DiskTier, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another worker uses this folder"):
        TierFolder(tmp_path)
    reopened(tier, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("name", ["secret", "blocks"])
def test_files_of_another_user_are_refused(tmp_path: Path, name: str) -> None:
    TierFolder(tmp_path).close()
    os.chown(tmp_path / name, 12345, -1)
    with pytest.raises(ConfigError, match=f"{name} belongs to another user"):
        TierFolder(tmp_path)
    os.chown(tmp_path / name, 0, -1)
    TierFolder(tmp_path).close()


def test_nobody_else_can_read_the_folder(tmp_path: Path) -> None:
    disk_tier(ENGINE, tmp_path / "new", 4).put(key(1), record(1))
    for path in (tmp_path / "new", *(tmp_path / "new").iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give a folder that this process can write"):
        TierFolder(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"--kv-disk-bytes.*takes 4096 bytes"):
        disk_tier(ENGINE, tmp_path / "small", 0)


@pytest.mark.parametrize("access", ["read", "write"])
def test_a_failing_device_is_a_failure_of_the_tier(tmp_path: Path, access: str) -> None:
    file = FaultyFile(tmp_path)
    tier = disk_tier(ENGINE, tmp_path, 4, lambda _path: file)
    tier.put(key(1), record(1))
    file.fails = lambda name: OSError(errno.EIO, "Input/output error") if name == access else None
    with pytest.raises(TierFailed, match="Input/output error"):
        tier.get([key(1)]) if access == "read" else tier.put(key(2), record(2))


def test_a_full_disk_is_a_failure_of_the_tier(tmp_path: Path) -> None:
    file = FaultyFile(tmp_path)
    tier = disk_tier(ENGINE, tmp_path, 4, lambda _path: file)
    file.fails = lambda name: disk_full() if name == "write" else None
    with pytest.raises(TierFailed, match="No space left"):
        tier.put(key(2), record(2))
    assert not tier.has(key(2))


@given(tears=st.integers(0, 3000), number=st.integers(0, 3))
def test_a_torn_write_is_never_opened(
    tears: int, number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The write is reported as done, and only part of it is kept, over an older record of the same
    slot."""
    path = tmp_path_factory.mktemp("torn")
    file = FaultyFile(path)
    tier = disk_tier(ENGINE, path, 1, lambda _path: file)
    tier.put(key(number), record(number))
    file.tears = tears
    tier.put(key(9), record(9))
    tier.close()
    tier = disk_tier(ENGINE, path, 1, lambda _path: file)
    for each in (number, 9):
        is_right(tier.get([key(each)])[0], each)
    tier.close()
