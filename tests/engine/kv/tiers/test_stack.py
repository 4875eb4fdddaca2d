"""Tiers as one: what goes down, what comes back, and what happens when a device fails."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from engine.kv.prefix_index import BlockIdentity, PrefixBlock
from engine.kv.tiers.fetch import Fetch, WantedBlock
from engine.kv.tiers.interface import Record, Tier, TierFailed
from engine.kv.tiers.record import record_key
from engine.kv.tiers.runner import ThreadRunner
from engine.kv.tiers.stack import Fetched, Saved, TierReport, TierStack
from engine.oracle import OracleEngine
from tests.support.kv_tiers import FaultyFile, StepRunner, disk_tier, host_tier, tier_stack


def identity(number: int) -> BlockIdentity:
    return BlockIdentity(number.to_bytes(32, "little"), bytes(32), bytes(16), b"")


def block(block_id: int) -> PrefixBlock:
    return PrefixBlock(identity(block_id), block_id, is_whole=True)


@dataclass
class Stack:
    """A stack of an engine, all of whose tiers pay."""

    engine: OracleEngine
    tiers: Sequence[Tier]
    reports: list[TierReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stack: TierStack
        self.runners: list[StepRunner]
        self.stack, self.runners = tier_stack(
            self.engine, self.tiers, self.reports.append, lambda: 0.0
        )
        for level in self.stack.levels:
            level.pays = True

    def run(self) -> None:
        while sum(runner.run() for runner in self.runners):
            pass

    def save(self, *block_ids: int) -> None:
        self.stack.save([block(block_id) for block_id in block_ids], lambda _block: True)
        self.run()

    def wanted(self, number: int, block_id: int) -> WantedBlock:
        key = record_key(identity(number), is_whole=True)
        level = self.stack.find(key)
        assert level is not None
        return WantedBlock(identity(number), block_id, key, True, level)

    def fetch(self, *wanted: tuple[int, int]) -> Fetch:
        """(number of the block that was saved, block to write) each."""
        fetch = Fetch("key", [self.wanted(*each) for each in wanted], None)
        self.stack.fetch(fetch)
        return fetch


def data_of(engine: OracleEngine) -> np.ndarray:  # type: ignore[type-arg]
    return engine.kv.data  # type: ignore[union-attr]


def test_blocks_come_back_from_each_tier(engine: OracleEngine, tmp_path: Path) -> None:
    stack = Stack(engine, [host_tier(engine, 2), disk_tier(engine, tmp_path, 8)])
    before = data_of(engine).copy()
    stack.save(0, 1, 2, 3)
    fetch = stack.fetch((0, 4), (1, 5), (2, 6), (3, 7))
    assert [(part.level, part.start, part.end) for part in fetch.segments] == [(1, 0, 2), (0, 2, 4)]
    stack.run()
    assert stack.reports[-1] == Fetched(fetch)
    assert fetch.num_loaded == 4
    np.testing.assert_array_equal(data_of(engine)[4:], before[:4])


def test_a_block_that_was_overwritten_during_its_copy_is_not_kept(engine: OracleEngine) -> None:
    """As vllm#45704, whose copies were not ordered after what they copied."""
    stack = Stack(engine, [host_tier(engine, 8)])
    looks: list[PrefixBlock] = []

    def is_current(block: PrefixBlock) -> bool:
        looks.append(block)
        return block.block_id != 1

    stack.stack.save([block(0), block(1), block(2)], is_current)
    stack.run()
    assert [each.block_id for each in looks] == [0, 1, 2]
    has = [stack.stack.find(record_key(identity(n), is_whole=True)) for n in range(3)]
    assert has == [0, None, 0]
    assert stack.reports == [Saved(3)]


def test_a_cancelled_fetch_writes_nothing_more(engine: OracleEngine, tmp_path: Path) -> None:
    stack = Stack(engine, [host_tier(engine, 2), disk_tier(engine, tmp_path, 8)])
    stack.save(0, 1, 2, 3)
    fetch = stack.fetch((0, 4), (1, 5), (2, 6), (3, 7))
    stack.runners[0].run()
    fetch.cancel()
    data_of(engine)[4:] = 0
    stack.run()
    assert not data_of(engine)[4:].any()
    assert fetch.num_loaded == 0
    assert stack.reports[-1] == Fetched(fetch)


def test_a_record_that_is_gone_ends_the_fetch_before_it(engine: OracleEngine) -> None:
    stack = Stack(engine, [host_tier(engine, 8)])
    stack.save(0, 1, 2)
    fetch = stack.fetch((0, 4), (1, 5), (2, 6))
    stack.tiers[0].remove(record_key(identity(1), is_whole=True))
    data_of(engine)[4:] = 0
    stack.run()
    assert fetch.num_loaded == 1
    assert not data_of(engine)[5:].any()


def test_a_wrong_record_is_removed_and_not_used(
    engine: OracleEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As LMCache#4991: what was not stored as a whole stays visible there."""
    file = FaultyFile(tmp_path)
    stack = Stack(engine, [disk_tier(engine, tmp_path, 8, lambda _path: file)])
    stack.save(0, 1, 2)
    place = file.data.rindex(record_key(identity(1), is_whole=True)[:32])
    file.data[place + 300] ^= 1
    fetch = stack.fetch((0, 4), (1, 5), (2, 6))
    data_of(engine)[4:] = 0
    stack.run()
    assert fetch.num_loaded == 1
    assert not data_of(engine)[5:].any()
    assert "its KV is damaged" in caplog.text
    assert stack.stack.find(record_key(identity(1), is_whole=True)) is None


class Swapping:
    """A tier that answers with another's record: as LMCache#4385, whose disk did."""

    name, is_shared, num_bytes = "disk", False, 0

    def __init__(self) -> None:
        self.records: dict[bytes, Record] = {}
        self.is_wrong = False

    def has(self, key: bytes) -> bool:
        return key in self.records

    def touch(self, key: bytes) -> None:
        pass

    def put(self, key: bytes, record: Record) -> Sequence[object]:
        self.records[key] = record
        return ()

    def get(self, keys: Sequence[bytes]) -> Sequence[Record | None]:
        if self.is_wrong:
            return [next(iter(self.records.values())) for _ in keys]
        return [self.records[key] for key in keys]

    def remove(self, key: bytes) -> None:
        self.records.pop(key, None)

    def cool(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


class Broken(Swapping):
    """A tier with a fault of its own: what it raises is no TierFailed."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = ""

    def put(self, key: bytes, record: Record) -> Sequence[object]:
        if self.broken == "put":
            raise KeyError(key)
        return super().put(key, record)

    def get(self, keys: Sequence[bytes]) -> Sequence[Record | None]:
        if self.broken == "get":
            raise KeyError(keys)
        return super().get(keys)


def test_a_fetch_ends_though_its_thread_cannot_follow_the_device(
    engine: OracleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(engine, [host_tier(engine, 8)])
    stack.save(0, 1)
    stack.reports.clear()
    fetch = stack.fetch((1, 5))

    def fail(_mark: object) -> None:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(engine.kv, "follow", fail)
    with pytest.raises(RuntimeError):
        stack.run()
    assert stack.reports == [Fetched(fetch)]
    assert fetch.num_loaded == 0


@pytest.mark.parametrize("broken", ["put", "get"])
def test_a_fault_of_a_tier_switches_it_off_and_all_that_waits_is_told(
    engine: OracleEngine, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    tier = Broken()
    stack = Stack(engine, [tier])  # type: ignore[list-item]
    stack.save(0, 1)
    stack.reports.clear()
    level = stack.stack.levels[0]
    tier.broken = broken
    if broken == "put":
        stack.stack.save([block(3)], lambda _: True)
    else:
        fetch = stack.fetch((1, 5))
    with pytest.raises(KeyError) as raised:
        stack.run()
    level.on_error(raised.value)
    assert "an internal fault: KeyError" in level.off_reason
    assert "KV tier disk is switched off: an internal fault" in caplog.text
    assert len(stack.reports) == 1
    if broken == "get":
        assert fetch.num_loaded == 0
    assert not level.is_used


def test_anothers_record_is_not_used(
    engine: OracleEngine, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Swapping()
    stack = Stack(engine, [tier])  # type: ignore[list-item]
    stack.save(0, 1)
    tier.is_wrong = True
    fetch = stack.fetch((1, 5))
    data_of(engine)[4:] = 0
    stack.run()
    assert fetch.num_loaded == 0
    assert not data_of(engine)[4:].any()
    assert "its key is another" in caplog.text


def test_a_tier_of_wrong_records_is_switched_off(engine: OracleEngine) -> None:
    tier = Swapping()
    stack = Stack(engine, [tier])  # type: ignore[list-item]
    for _ in range(64):
        tier.is_wrong = False
        stack.save(0, 1)
        tier.is_wrong = True
        stack.fetch((1, 5))
        stack.run()
    assert stack.stack.levels[0].off_reason == "64 records were wrong: its key is another"


@pytest.mark.parametrize("access", ["read", "write"])
def test_a_failing_disk_is_switched_off_once_and_others_work_on(
    engine: OracleEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, access: str
) -> None:
    file = FaultyFile(tmp_path)
    disk = disk_tier(engine, tmp_path, 8, lambda _path: file)
    stack = Stack(engine, [host_tier(engine, 2), disk])
    stack.save(0, 1, 2, 3)
    fetch = stack.fetch((0, 4), (3, 7))
    file.fails = lambda name: OSError(errno.EIO, "Input/output error") if name == access else None
    stack.run()
    stack.save(4, 5, 6)
    assert fetch.num_loaded == (0 if access == "read" else 2)
    assert stack.stack.levels[1].off_reason.endswith("failed: Input/output error")
    lines = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 1
    assert "KV tier disk is switched off" in lines[0].getMessage()
    assert stack.stack.find(record_key(identity(0), is_whole=True)) is None
    assert stack.stack.find(record_key(identity(6), is_whole=True)) == 0


@pytest.mark.parametrize("is_late_first", [True, False])
def test_a_disk_that_fails_and_is_late_stays_off(
    engine: OracleEngine, tmp_path: Path, is_late_first: bool
) -> None:
    stack = Stack(engine, [disk_tier(engine, tmp_path, 8)])
    (level,) = stack.stack.levels
    for is_late in (is_late_first, not is_late_first):
        level.switch_off("late" if is_late else "a write failed", may_return=is_late)
    stack.stack.probe(0)
    stack.run()
    assert level.off_reason


def test_a_tier_that_does_not_pay_is_neither_written_nor_read(
    engine: OracleEngine, tmp_path: Path
) -> None:
    stack = Stack(engine, [host_tier(engine, 2), disk_tier(engine, tmp_path, 8)])
    stack.save(0, 1, 2, 3)
    stack.stack.levels[1].pays = False
    assert stack.stack.find(record_key(identity(0), is_whole=True)) is None
    stack.save(4, 5, 6)
    stack.stack.levels[1].pays = True
    assert stack.stack.find(record_key(identity(4), is_whole=True)) is None
    stack.stack.levels[0].pays = False
    stack.save(7)
    assert stack.stack.find(record_key(identity(7), is_whole=True)) == 1


class Shared(Swapping):
    """A store that may go away and come back."""

    name, is_shared = "store", True

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False

    def put(self, key: bytes, record: Record) -> Sequence[object]:
        if self.is_away:
            raise TierFailed("away")
        return super().put(key, record)

    def get(self, keys: Sequence[bytes]) -> Sequence[Record | None]:
        if self.is_away:
            raise TierFailed("away")
        return [self.records.get(key) for key in keys]


def test_a_store_is_written_at_once_and_comes_back_after_an_outage(engine: OracleEngine) -> None:
    store = Shared()
    stack = Stack(engine, [host_tier(engine, 8), store])  # type: ignore[list-item]
    stack.save(0, 1)
    assert len(store.records) == 2
    store.is_away = True
    stack.save(2)
    assert stack.stack.levels[1].off_reason == "away"
    stack.stack.probe(1)
    stack.run()
    assert stack.stack.levels[1].off_reason == "away"
    store.is_away = False
    stack.stack.probe(1)
    stack.run()
    assert not stack.stack.levels[1].off_reason
    stack.save(3)
    assert len(store.records) == 3


def test_a_runner_prefers_urgent_jobs_and_ends_though_its_device_hangs() -> None:
    errors: list[Exception] = []
    runner = ThreadRunner("test", errors.append, close_timeout_s=0.05)
    release, begun, order = threading.Event(), threading.Event(), list[int]()

    def hang() -> None:
        begun.set()
        release.wait()

    runner.submit(hang)
    begun.wait()
    runner.submit(lambda: order.append(1))
    runner.submit(lambda: order.append(0), is_urgent=True)
    runner.close(lambda: order.append(2))
    assert not order
    release.set()
    runner.close(lambda: None)
    assert order == [0, 1, 2]
    assert not errors


def test_a_job_that_raises_is_reported_and_the_next_ones_run() -> None:
    errors: list[Exception] = []
    runner, order = ThreadRunner("test", errors.append), list[int]()
    runner.submit(lambda: order.append(1 // 0))
    runner.submit(lambda: order.append(1))
    runner.close(lambda: order.append(2))
    assert order == [1, 2]
    assert list(map(type, errors)) == [ZeroDivisionError]
