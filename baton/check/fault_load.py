"""Continuous streams through a cluster under faults: measures the cost of each fault and checks the
streams."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.check.doors import Door, SdkDoor
from baton.check.process_faults import Fault, TargetT
from baton.check.stream_history import StreamHistory, StreamRequest
from baton.client import AsyncClient
from baton.errors import BatonError

#: Seconds within which the gateway detects an ended connection.
NOTICED_S = 0.5
#: Seconds between the end of a fault and the next one.
CALM_S = 1.5
#: Seconds after the last stream before blocks are counted.
QUIET_S = 10.0

#: Shares of clients that cancel at some token, and that stop reading once, and the length of that
#: pause in seconds.
CANCEL_SHARE, PAUSE_SHARE, PAUSE_S = 0.06, 0.06, 1.0

RequestT = TypeVar("RequestT", bound=StreamRequest)


@dataclass(slots=True)
class StreamRecord(Generic[RequestT]):
    """Result of one stream. fault: the fault during the stream, or empty. door: how it was sent.

    longest_gap_s: longest gap between two tokens of a choice.
    difference: a fault in its tokens; disorder: a fault in their order, or at the end of the
    stream; see StreamHistory.
    """

    request: RequestT
    history: StreamHistory
    fault: str
    door: str = ""
    num_resumes: int = 0
    longest_gap_s: float = 0.0
    error: str = ""
    difference: str = ""
    disorder: str = ""
    has_paused: bool = False
    is_whole: bool = False

    @property
    def is_wrong(self) -> bool:
        return bool(self.difference or self.disorder)

    def compare(self, right: Sequence[Sequence[int]] | None) -> None:
        """Compare with the right tokens of each choice; None if unknown."""
        if right is not None:
            self.difference = self.history.difference(right, is_whole=self.is_whole)
        self.disorder = self.history.disorder(is_whole=self.is_whole)


class Load(Generic[RequestT]):
    """Runs streams continuously until stopped."""

    def __init__(
        self,
        client: AsyncClient,
        draw: Callable[[random.Random], RequestT],
        rng: random.Random,
        concurrency: int,
        on_end: Callable[[StreamRecord[RequestT]], None],
        doors: Sequence[Door] = (),
    ) -> None:
        """on_end: receives the record of each ended stream. doors: for each request one is drawn of
        those that take it; the SDK alone if empty."""
        self._doors = doors or (SdkDoor(client),)
        self._draw = draw
        self._rng = rng
        self._on_end = on_end
        self._is_over = False
        self._fault = ""
        self._live: list[StreamRecord[RequestT]] = []
        self._ended = asyncio.Condition()
        self._num_faulted = 0
        self._tasks = [asyncio.create_task(self._run()) for _ in range(concurrency)]

    @property
    def num_faulted(self) -> int:
        """Ended streams that ran during a fault."""
        return self._num_faulted

    def begin_fault(self, fault: str) -> None:
        """Begin a fault: it is attributed to all streams that run before its end."""
        self._fault = fault
        for record in self._live:
            record.fault = fault

    async def end_fault(self) -> None:
        """Wait until all streams affected by the fault have ended."""
        self._fault = ""
        async with self._ended:
            await self._ended.wait_for(lambda: not any(record.fault for record in self._live))

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _run(self) -> None:
        while not self._is_over:
            request = self._draw(self._rng)
            door = self._rng.choice([door for door in self._doors if door.takes(request)])
            record = StreamRecord(request, StreamHistory(request), self._fault, door.name)
            self._live.append(record)
            retry_after_s = 0.0
            try:
                await self._stream(record, door)
            except BatonError as error:
                record.error = error.reason
                retry_after_s = min(error.retry_after_s or 0.2, 1.0)
            self._num_faulted += bool(record.fault)
            self._on_end(record)
            async with self._ended:
                self._live.remove(record)
                self._ended.notify_all()
            await asyncio.sleep(retry_after_s)

    async def _stream(self, record: StreamRecord[RequestT], door: Door) -> None:
        params = record.request.params
        mood, at_token = self._rng.random(), self._rng.randrange(params.max_tokens or 1)
        last_s: dict[int, float] = {}
        async with door.stream(record.request) as stream:
            async for chunk in stream:
                record.history.take(chunk)
                now_s = time.monotonic()
                gap_s = now_s - last_s.get(chunk.choice, now_s)
                record.longest_gap_s = max(record.longest_gap_s, gap_s)
                last_s[chunk.choice] = now_s
                if chunk.timing:
                    record.num_resumes = chunk.timing.num_resumes
                if chunk.token_index < at_token:
                    continue
                if mood < CANCEL_SHARE:
                    return
                if mood < CANCEL_SHARE + PAUSE_SHARE and not record.has_paused:
                    record.has_paused = True
                    await asyncio.sleep(PAUSE_S)
        record.is_whole = True


async def load_through_faults(
    load: Load[RequestT],
    faults: Sequence[Fault[TargetT]],
    target_of: Callable[[int], TargetT],
    client: AsyncClient,
    is_enough: Callable[[int], bool],
    on_fault: Callable[[Fault[TargetT]], None],
) -> int:
    """Inject the faults in rounds, each once all streams of the previous one have ended, until
    `is_enough(rounds)`; then stop the load. Return the number of rounds.

    target_of: the target of a round, by its number. on_fault: called after each fault.
    """
    num_rounds = 0
    while not is_enough(num_rounds):
        target = target_of(num_rounds)
        for fault in faults:
            await asyncio.sleep(CALM_S)
            load.begin_fault(fault.name)
            await fault.inject(target)
            await until_healed(target.num_workers, client)
            await load.end_fault()
            on_fault(fault)
        num_rounds += 1
    await load.stop()
    return num_rounds


async def until_healed(num_workers: int, client: AsyncClient) -> None:
    """Wait until all workers are ready again, after a delay in which the gateway notices the
    fault."""
    await asyncio.sleep(NOTICED_S)
    while True:
        try:
            workers = (await client.model()).workers
        except BatonError:
            workers = ()
        if sum(worker.state == "ready" for worker in workers) == num_workers:
            return
        await asyncio.sleep(0.1)


async def leaked_blocks(client: AsyncClient) -> int:
    """Blocks still held `QUIET_S` after the last stream."""
    await asyncio.sleep(QUIET_S)
    return sum(worker.num_leased_blocks for worker in (await client.model()).workers)


@dataclass(frozen=True, slots=True)
class FaultResult:
    """Streams during one kind of fault, without those of pausing readers in the gaps.

    gap_p50_s, gap_p99_s: longest gap per resumed stream.
    longest_s: longest gap of any stream.
    """

    fault: str
    num_faults: int
    num_streams: int
    num_resumed: int
    num_errors: int
    num_wrong: int
    gap_p50_s: float
    gap_p99_s: float
    longest_s: float
    errors: tuple[str, ...] = field(default=())


def result_of(
    fault: str, num_faults: int, records: Sequence[StreamRecord[RequestT]]
) -> FaultResult:
    gaps = sorted(r.longest_gap_s for r in records if r.num_resumes and not r.has_paused)
    return FaultResult(
        fault,
        num_faults,
        len(records),
        sum(bool(r.num_resumes) for r in records),
        sum(bool(r.error) for r in records),
        sum(r.is_wrong for r in records),
        gaps[len(gaps) // 2] if gaps else 0.0,
        gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))] if gaps else 0.0,
        max((r.longest_gap_s for r in records if not r.has_paused), default=0.0),
        tuple(sorted({r.error for r in records if r.error})),
    )


def results_by_fault(
    faults: Sequence[Fault[TargetT]], num_rounds: int, records: Sequence[StreamRecord[RequestT]]
) -> list[FaultResult]:
    """Results by fault; streams without a fault come first, as "none"."""
    results = [result_of("none", 0, [record for record in records if not record.fault])]
    for fault in faults:
        through = [record for record in records if record.fault == fault.name]
        results.append(result_of(fault.name, num_rounds, through))
    return results
