"""Faults on real processes and their links under load: what each costs, and that no stream loses,
doubles or changes a token.

    python -m bench.chaos [--num-streams 500] [--seed N] [--only TEXT] [--json FILE]

Starts prefill and decode workers on oracle engines, whose right output is known, and a gateway,
with a proxy on every link between them and to the clients. Streams come without end,
`--concurrency` at once, each of 1 or 2 choices, greedy or seeded; some clients stop reading for a
while, and some give up. One fault after the other is inflicted, and the next one not before all
that lived through the last one have ended, until enough have lived through one: they ran at some
time between the fault and the moment when all workers were ready again. At the end, no block may be
held 10 s after the last stream.

Shown per fault: streams that lived through it; of them resumed, ended by an error, and wrong (a
token lost, doubled or not the oracle's, something after the end, or a wrong charge); and of the
resumed, but for those whose readers stopped, the longest silence between two tokens (the resume
gap); and the longest silence of any, resumed or not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.errors import BatonError
from bench.chaos_faults import FAULTS, Fault, Scene
from bench.fault_proxy import ProxiedCluster
from bench.machine import describe_commit, describe_machine, describe_versions
from bench.stream_history import StreamHistory, StreamRequest, draw_request

STEP_MS = 16.0
CHUNK_TOKENS = 128
NUM_TOKENS = 160
MAX_PROMPT_TOKENS = 400
QUIET_S = 10.0

#: Within which the gateway notices a connection that has ended.
NOTICED_S = 0.5

#: Of the clients, those that give up at some token, and those that once read nothing for a while.
CANCEL_SHARE, PAUSE_SHARE, PAUSE_S = 0.06, 0.06, 1.0

#: Longest time to compute a prompt and all its output anew, alone, in seconds.
REPREFILL_S = (MAX_PROMPT_TOKENS + NUM_TOKENS) / CHUNK_TOKENS * STEP_MS / 1e3


@dataclass(slots=True)
class StreamRecord:
    """What became of one stream. fault: what was going on while it ran, if anything."""

    history: StreamHistory
    fault: str
    num_resumes: int = 0
    longest_gap_s: float = 0.0
    error: str = ""
    wrong: str = ""
    has_paused: bool = False
    is_whole: bool = False


class Load:
    """Streams without end, until stopped."""

    def __init__(self, client: AsyncClient, rng: random.Random, concurrency: int) -> None:
        self._client = client
        self._rng = rng
        self._is_over = False
        self._fault = ""
        self._live: list[StreamRecord] = []
        self._ended = asyncio.Condition()
        self.records: list[StreamRecord] = []
        self._tasks = [asyncio.create_task(self._run()) for _ in range(concurrency)]

    @property
    def num_faulted(self) -> int:
        return sum(bool(record.fault) for record in self.records)

    def begin_fault(self, fault: str) -> None:
        """Whatever runs now, or begins before the end of the fault, lives through it."""
        self._fault = fault
        for record in self._live:
            record.fault = fault

    async def end_fault(self) -> None:
        """Returns when all that lived through it have ended."""
        self._fault = ""
        async with self._ended:
            await self._ended.wait_for(lambda: not any(record.fault for record in self._live))

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _run(self) -> None:
        while not self._is_over:
            request = draw_request(self._rng, MAX_PROMPT_TOKENS, NUM_TOKENS)
            record = StreamRecord(StreamHistory(request), self._fault)
            self.records.append(record)
            self._live.append(record)
            retry_after_s = 0.0
            try:
                await self._stream(record, request)
            except BatonError as error:
                record.error = error.reason
                retry_after_s = min(error.retry_after_s or 0.2, 1.0)
            async with self._ended:
                self._live.remove(record)
                self._ended.notify_all()
            await asyncio.sleep(retry_after_s)

    async def _stream(self, record: StreamRecord, request: StreamRequest) -> None:
        mood, at_token = self._rng.random(), self._rng.randrange(NUM_TOKENS)
        last_s: dict[int, float] = {}
        async with self._client.stream(request.prompt, request.params) as stream:
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


@dataclass(frozen=True, slots=True)
class FaultResult:
    """Streams that lived through one kind of fault."""

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


def result_of(fault: str, num_faults: int, records: Sequence[StreamRecord]) -> FaultResult:
    gaps = sorted(r.longest_gap_s for r in records if r.num_resumes and not r.has_paused)
    return FaultResult(
        fault,
        num_faults,
        len(records),
        sum(bool(r.num_resumes) for r in records),
        sum(bool(r.error) for r in records),
        sum(bool(r.wrong) for r in records),
        gaps[len(gaps) // 2] if gaps else 0.0,
        gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))] if gaps else 0.0,
        max((r.longest_gap_s for r in records if not r.has_paused), default=0.0),
        tuple(sorted({r.error for r in records if r.error})),
    )


async def until_healed(cluster: ProxiedCluster, client: AsyncClient) -> None:
    """All workers are ready again, and clients can see it, once the gateway has had time to notice
    that they were not."""
    await asyncio.sleep(NOTICED_S)
    num_workers = sum(not name.startswith("gateway") for name in cluster.names)
    while True:
        try:
            workers = (await client.model()).workers
        except BatonError:
            workers = ()
        if sum(worker.state == "ready" for worker in workers) == num_workers:
            return
        await asyncio.sleep(0.1)


async def leaked_blocks(client: AsyncClient) -> int:
    """Blocks that somebody still holds `QUIET_S` after the last stream."""
    await asyncio.sleep(QUIET_S)
    return sum(worker.num_leased_blocks for worker in (await client.model()).workers)


async def chaos(
    faults: Sequence[Fault], num_streams: int, concurrency: int, seed: int, console: Console
) -> tuple[list[FaultResult], int]:
    """Results by fault, and blocks leaked, once `num_streams` streams lived through a fault."""
    options = ServeOptions(
        model="models/baton-py-6m",
        engine="oracle",
        generation_config="none",
        oracle_step_ms=STEP_MS,
        max_num_batched_tokens=CHUNK_TOKENS,
        num_prefill_workers=2,
        num_decode_workers=2,
        prefill_block_size=32,
        decode_block_size=8,
        num_gpu_blocks_override=4000,
        kv_transport="tcp",
        port=0,
        drain_timeout_s=5,
        log_level="error",
    )
    rng = random.Random(seed)
    num_rounds = 0
    async with (
        ProxiedCluster(options) as cluster,
        AsyncClient(cluster.front, max_retries=0) as client,
        AsyncClient(cluster.address, max_retries=0) as observer,
    ):
        load = Load(client, rng, concurrency)
        while load.num_faulted < num_streams:
            scene = Scene(cluster, num_rounds % 2, 1 - num_rounds % 2)
            for fault in faults:
                await asyncio.sleep(1.5)
                load.begin_fault(fault.name)
                await fault.inflict(scene)
                await until_healed(cluster, client)
                await load.end_fault()
                console.print(f"{fault.name}: {load.num_faulted} streams faulted so far")
            num_rounds += 1
        await load.stop()
        num_leaked = await leaked_blocks(observer)
    judge(load.records)
    results = [result_of("none", 0, [record for record in load.records if not record.fault])]
    for fault in faults:
        through = [record for record in load.records if record.fault == fault.name]
        results.append(result_of(fault.name, num_rounds, through))
    return results, num_leaked


def judge(records: Sequence[StreamRecord]) -> None:
    """Compare all with the oracle. Afterwards, and beside this process: it takes longer than a
    stream's steps do."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=context) as pool:
        for record, wrong in zip(records, pool.map(_verdict, records, chunksize=8), strict=True):
            record.wrong = wrong


def _verdict(record: StreamRecord) -> str:
    return record.history.verdict(is_whole=record.is_whole)


def table_of(results: Sequence[FaultResult]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in (
        "fault",
        "times",
        "streams",
        "resumed",
        "errors",
        "wrong",
        "gap p50",
        "p99",
        "longest, s",
    ):
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    for result in results:
        table.add_row(
            result.fault,
            str(result.num_faults),
            str(result.num_streams),
            str(result.num_resumed),
            str(result.num_errors),
            str(result.num_wrong),
            f"{result.gap_p50_s:.2f}",
            f"{result.gap_p99_s:.2f}",
            f"{result.longest_s:.2f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num-streams", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="faults that have this in their names")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console()
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    if not faults:
        parser.error(f"--only={arguments.only}: no fault has this in its name")
    results, num_leaked = asyncio.run(
        chaos(faults, arguments.num_streams, arguments.concurrency, arguments.seed, console)
    )
    console.print(table_of(results))
    num_wrong = sum(result.num_wrong for result in results)
    console.print(f"wrong streams: {num_wrong}; blocks leaked: {num_leaked}")
    console.print(f"longest re-prefill: {REPREFILL_S:.3f} s")
    if arguments.json:
        document: dict[str, Any] = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "commit": describe_commit(),
            "faults": [asdict(result) for result in results],
            "num_leaked_blocks": num_leaked,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if num_wrong or num_leaked else 0


if __name__ == "__main__":
    sys.exit(main())
