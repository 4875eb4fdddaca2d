"""A real worker on a disk that dies: a file system that tears, fails, delays and holds up accesses.
Every answer is right, requests go on, and the worker says what is wrong."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.test_kv_tiers_in_service import (
    NUM_PROMPTS,
    ask,
    colocated,
    tiers_of,
)
from tests.support.fuse_faults import FaultyDisk, faulty_disk
from tests.support.live_tiers import LiveSystem

pytestmark = pytest.mark.slow
LONG = pytest.mark.long


@asynccontextmanager
async def worker_on_disk(path: Path) -> AsyncIterator[tuple[FaultyDisk, LiveSystem]]:
    """A worker whose disk works, and has most of the prompts."""
    with faulty_disk(path) as disk:
        async with colocated(kv_disk_dir=str(path), kv_disk_bytes=4 << 20) as system:
            await ask(system, *range(NUM_PROMPTS))
            assert sum(await ask(system, *range(NUM_PROMPTS))) > 100 * NUM_PROMPTS // 2
            yield disk, system


def tear(disk: FaultyDisk) -> None:
    disk.tears = 0.5


def fail_reads(disk: FaultyDisk) -> None:
    disk.read_error = errno.EIO


def fail_writes(disk: FaultyDisk) -> None:
    disk.write_error = errno.ENOSPC


def hold_up(disk: FaultyDisk) -> None:
    disk.goes_on.clear()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (fail_reads, "a read failed: Input/output error"),
        pytest.param(fail_writes, "a write failed: No space left on device", marks=LONG),
        pytest.param(hold_up, "no answer within", marks=LONG),
    ],
)
async def test_a_dying_disk_is_switched_off_and_requests_go_on(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[FaultyDisk], None],
    reason: str,
) -> None:
    async with worker_on_disk(tmp_path) as (disk, system):
        fault(disk)
        async with asyncio.timeout(60):
            await ask(system, *range(2 * NUM_PROMPTS))
            (tier,) = await tiers_of(system)
            assert reason in tier.off_reason
            await ask(system, *range(NUM_PROMPTS))
        assert caplog.text.count("KV tier disk is switched off") == 1
        disk.goes_on.set()


async def test_torn_writes_are_never_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker_on_disk(tmp_path) as (disk, system):
        tear(disk)
        others = range(NUM_PROMPTS, 2 * NUM_PROMPTS)
        await ask(system, *others)
        await ask(system, *others)
        assert "a record of KV tier disk is not used" in caplog.text
        disk.tears = 1.0
        later = range(3 * NUM_PROMPTS, 4 * NUM_PROMPTS)
        await ask(system, *later)
        assert sum(await ask(system, *later)) > 100 * NUM_PROMPTS // 2


@LONG
async def test_a_disk_that_becomes_slow_is_left_alone(tmp_path: Path) -> None:
    async with worker_on_disk(tmp_path) as (disk, system):
        disk.delay_s = 0.3
        async with asyncio.timeout(90):
            await ask(system, *range(NUM_PROMPTS))
            (tier,) = await tiers_of(system)
            assert tier.off_reason or not tier.pays
            assert sum(await ask(system, *range(NUM_PROMPTS))) < 100 * NUM_PROMPTS // 2
        disk.delay_s = 0.0


@LONG
async def test_records_that_a_crash_tore_are_found_out_after_the_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty_disk(tmp_path) as disk:
        options = {"kv_disk_dir": str(tmp_path), "kv_disk_bytes": 4 << 20}
        async with colocated(**options) as system:
            await ask(system, *range(3))
            tear(disk)
            await ask(system, *range(3, NUM_PROMPTS))
        disk.tears = 1.0
        async with colocated(**options) as system:
            await ask(system, 99)
            await ask(system, *range(NUM_PROMPTS))
            await ask(system, *range(NUM_PROMPTS))
    assert "a record of KV tier disk is not used" in caplog.text
