"""Tiers of KV for tests: threads whose jobs run when the test says, and a file that fails."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.types import NumericsClass
from engine.interface import Engine
from engine.kv.tiers.disk import DiskTier, SlotFile, TierFolder
from engine.kv.tiers.host import HostTier
from engine.kv.tiers.interface import Record, Tier
from engine.kv.tiers.record import RecordFormat
from engine.kv.tiers.runner import Job
from engine.kv.tiers.stack import Level, TierReport, TierStack

ORACLE = NumericsClass("oracle", dtype="int64")


class StepRunner:
    """Implements Runner: a job waits until `run` takes it."""

    def __init__(self) -> None:
        self.urgent: deque[Job] = deque()
        self.jobs: deque[Job] = deque()

    def submit(self, job: Job, *, is_urgent: bool = False) -> None:
        (self.urgent if is_urgent else self.jobs).append(job)

    def run(self) -> bool:
        """Run the next job. Returns whether there was one."""
        jobs = self.urgent or self.jobs
        if not jobs:
            return False
        jobs.popleft()()
        return True

    def close(self, last: Job) -> None:
        while self.run():
            pass
        last()


def record_format(
    engine: Engine,
    *,
    secret: bytes = bytes(32),
    numerics: NumericsClass = ORACLE,
    is_shared: bool = False,
) -> RecordFormat:
    return RecordFormat(engine.kv.groups, numerics, secret, is_shared=is_shared)


def host_tier(engine: Engine, num_blocks: int) -> HostTier:
    size = record_format(engine).max_bytes
    return HostTier(num_blocks * size, size)


def disk_tier(
    engine: Engine,
    path: Path,
    num_blocks: int,
    open_file: Callable[[Path], SlotFile] | None = None,
) -> DiskTier:
    """The records of the oracle's blocks take less than a slot each."""
    folder = TierFolder(path, open_file) if open_file else TierFolder(path)
    form = record_format(engine)
    return DiskTier(folder, num_blocks * 4096, form.max_bytes, form.head_bytes, form.key_of)


def tier_stack(
    engine: Engine,
    tiers: Sequence[Tier],
    report: Callable[[TierReport], None],
    clock: Callable[[], float],
    *,
    is_shared: bool = False,
) -> tuple[TierStack, list[StepRunner]]:
    """A measured stack, and its tiers' runners."""
    runners = [StepRunner() for _ in tiers]
    levels = [Level(tier, runner) for tier, runner in zip(tiers, runners, strict=True)]
    form = record_format(engine, is_shared=is_shared)
    stack = TierStack(engine.kv, form, levels, clock)
    stack.report_to(report)
    stack.measure()
    return stack, runners


class FaultyFile:
    """A SlotFile in memory. fails: called before each access with its name ("read", "write", ...);
    an OSError that it returns is raised. tears: writes of which only so many bytes are kept."""

    def __init__(self, path: Path) -> None:
        del path
        self.data = bytearray()
        self.fails: Callable[[str], OSError | None] = lambda _name: None
        self.tears: int | None = None

    def read(self, num_bytes: int, offset: int) -> bytes:
        self._check("read")
        return bytes(self.data[offset : offset + num_bytes])

    def write(self, data: Sequence[Record], offset: int) -> int:
        self._check("write")
        whole = b"".join(map(bytes, data))
        kept = whole if self.tears is None else whole[: self.tears]
        self.data.extend(bytes(max(0, offset + len(whole) - len(self.data))))
        self.data[offset : offset + len(kept)] = kept
        return len(whole)

    def num_bytes(self) -> int:
        return len(self.data)

    def cool(self, offsets: Sequence[int], num_bytes: int) -> None:
        del offsets, num_bytes
        self._check("cool")

    def truncate(self, num_bytes: int) -> None:
        del self.data[num_bytes:]

    def close(self) -> None:
        pass

    def _check(self, name: str) -> None:
        if error := self.fails(name):
            raise error


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")
