"""Faults on real processes under load: what each costs, and that no stream loses, doubles or changes a token.

    python -m bench.chaos [--num-streams 500] [--seed N] [--json FILE]

Starts prefill and decode workers on oracle engines, whose right output is known in advance, and a gateway. Streams come
without end, `--concurrency` at once, each of 1 or 2 choices, greedy or seeded. One fault after the other is done to the
processes, by signals, until enough streams have lived through one: they ran at some time between the fault and the moment
when all workers were ready again. At the end, no block may be held 10 s after the last stream.

Told per fault: streams that lived through it; of them resumed, ended by an error, and wrong (a token lost, doubled or not
the oracle's, or something after the end); and of the resumed, the longest silence between two tokens (the resume gap).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.client import AsyncClient, SamplingParams
from baton.config import ServeOptions
from baton.engine.oracle import oracle_tokens
from baton.errors import BatonError
from baton.supervisor import Cluster
from baton.types import Sampling
from bench.machine import describe_commit, describe_machine, describe_versions

#: Vocabulary of the oracle engine.
VOCAB_SIZE = 1000
STEP_MS = 8.0
CHUNK_TOKENS = 64
NUM_TOKENS = 300
MAX_PROMPT_TOKENS = 400
QUIET_S = 10.0

#: Longest time to compute a prompt and all its output anew, alone, in seconds.
REPREFILL_S = (MAX_PROMPT_TOKENS + NUM_TOKENS) / CHUNK_TOKENS * STEP_MS / 1e3


@dataclass(slots=True)
class StreamRecord:
    """What one client saw. Times in seconds of the monotonic clock. fault: what was going on while it ran, if anything."""

    began_s: float
    ended_s: float = 0.0
    fault: str = ""
    num_resumes: int = 0
    longest_gap_s: float = 0.0
    error: str = ""
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to processes. `inflict` returns when it is over, healing apart."""

    name: str
    inflict: Callable[[Cluster], Awaitable[None]]


def _killing(*names: str) -> Callable[[Cluster], Awaitable[None]]:
    async def inflict(cluster: Cluster) -> None:
        for name in names:
            os.kill(cluster.pid_of(name), signal.SIGKILL)

    return inflict


def _terminating(name: str) -> Callable[[Cluster], Awaitable[None]]:
    async def inflict(cluster: Cluster) -> None:
        os.kill(cluster.pid_of(name), signal.SIGTERM)

    return inflict


def _freezing(name: str, seconds: float) -> Callable[[Cluster], Awaitable[None]]:
    async def inflict(cluster: Cluster) -> None:
        pid = cluster.pid_of(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    return inflict


FAULTS = (
    Fault("kill a prefill worker", _killing("prefill-0")),
    Fault("kill a decode worker", _killing("decode-0")),
    Fault("freeze a decode worker for 6 s", _freezing("decode-1", 6.0)),
    Fault("freeze a prefill worker for 6 s", _freezing("prefill-1", 6.0)),
    Fault("kill one of each tier", _killing("prefill-1", "decode-1")),
    Fault("stall a decode worker for 1 s", _freezing("decode-0", 1.0)),
    Fault("terminate a decode worker", _terminating("decode-0")),
    Fault("terminate a prefill worker", _terminating("prefill-0")),
    Fault("kill the whole prefill tier", _killing("prefill-0", "prefill-1")),
    Fault("kill the whole decode tier", _killing("decode-0", "decode-1")),
    Fault("kill the gateway", _killing("gateway")),
)


class Load:
    """Streams without end, until told to stop."""

    def __init__(self, client: AsyncClient, rng: random.Random, concurrency: int) -> None:
        self._client = client
        self._rng = rng
        self._is_over = False
        self._fault = ""
        self.live: set[int] = set()
        self.records: list[StreamRecord] = []
        self._tasks = [asyncio.create_task(self._run()) for _ in range(concurrency)]

    def begin_fault(self, fault: str) -> None:
        """Whatever runs now, or begins before the end of the fault, lives through it."""
        self._fault = fault
        for index in self.live:
            self.records[index].fault = self.records[index].fault or fault

    def end_fault(self) -> None:
        self._fault = ""

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _run(self) -> None:
        while not self._is_over:
            record = StreamRecord(time.monotonic(), fault=self._fault)
            index = len(self.records)
            self.records.append(record)
            self.live.add(index)
            try:
                await self._stream(record)
            except BatonError as error:
                record.error = error.reason
                await asyncio.sleep(min(error.retry_after_s or 0.2, 1.0))
            finally:
                record.ended_s = time.monotonic()
                self.live.discard(index)

    async def _stream(self, record: StreamRecord) -> None:
        rng = self._rng
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(20, MAX_PROMPT_TOKENS))]
        temperature, seed, n = rng.choice([0.0, 0.7]), rng.getrandbits(63), rng.choice([1, 1, 2])
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True, n=n
        )
        seen: dict[int, list[int]] = {choice: [] for choice in range(n)}
        last_s: dict[int, float] = {}
        has_ended = False
        async with self._client.stream(prompt, params) as stream:
            async for chunk in stream:
                now_s = time.monotonic()
                tokens = seen[chunk.choice]
                if has_ended or chunk.token_index != len(tokens):
                    record.wrong = f"index {chunk.token_index} after {len(tokens)} tokens"
                tokens += chunk.token_ids
                if chunk.choice in last_s:
                    gap_s = now_s - last_s[chunk.choice]
                    record.longest_gap_s = max(record.longest_gap_s, gap_s)
                last_s[chunk.choice] = now_s
                if chunk.timing:
                    has_ended = True
                    record.num_resumes = chunk.timing.num_resumes
        sampling = Sampling(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS)
        for choice, tokens in seen.items():
            if tokens != oracle_tokens(prompt, sampling, VOCAB_SIZE, choice):
                record.wrong = f"choice {choice} is not the oracle's"


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
    errors: tuple[str, ...] = field(default=())


def result_of(fault: str, num_faults: int, records: Sequence[StreamRecord]) -> FaultResult:
    gaps = sorted(r.longest_gap_s for r in records if r.num_resumes)
    return FaultResult(
        fault,
        num_faults,
        len(records),
        len(gaps),
        sum(bool(r.error) for r in records),
        sum(bool(r.wrong) for r in records),
        gaps[len(gaps) // 2] if gaps else 0.0,
        gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))] if gaps else 0.0,
        tuple(sorted({r.error for r in records if r.error})),
    )


async def until_healed(cluster: Cluster, client: AsyncClient) -> None:
    """All workers are ready again."""
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
    num_streams: int, concurrency: int, seed: int, console: Console
) -> tuple[list[FaultResult], int]:
    """Results by fault, and blocks leaked, once `num_streams` streams lived through a fault."""
    options = ServeOptions(
        model="models/baton-py-6m",
        engine="oracle",
        oracle_step_ms=STEP_MS,
        max_num_batched_tokens=CHUNK_TOKENS,
        num_prefill_workers=2,
        num_decode_workers=2,
        prefill_block_size=32,
        decode_block_size=8,
        num_gpu_blocks_override=4000,
        port=0,
        drain_timeout_s=5,
        log_level="error",
    )
    rng = random.Random(seed)
    num_faults = dict.fromkeys((fault.name for fault in FAULTS), 0)
    async with Cluster(options) as cluster, AsyncClient(cluster.address) as client:
        load = Load(client, rng, concurrency)
        while sum(bool(record.fault) for record in load.records) < num_streams:
            for fault in FAULTS:
                await asyncio.sleep(1.5)
                load.begin_fault(fault.name)
                num_faults[fault.name] += 1
                await fault.inflict(cluster)
                await until_healed(cluster, client)
                load.end_fault()
                num_done = sum(bool(record.fault) for record in load.records)
                console.print(f"{fault.name}: {num_done} streams faulted so far")
        await load.stop()
        num_leaked = await leaked_blocks(client)
    calm = [record for record in load.records if not record.fault]
    results = [result_of("none", 0, calm)]
    for fault in FAULTS:
        through = [record for record in load.records if record.fault == fault.name]
        results.append(result_of(fault.name, num_faults[fault.name], through))
    return results, num_leaked


def table_of(results: Sequence[FaultResult]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("fault", "times", "streams", "resumed", "errors", "wrong", "gap p50", "p99 s"):
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
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num-streams", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console()
    results, num_leaked = asyncio.run(
        chaos(arguments.num_streams, arguments.concurrency, arguments.seed, console)
    )
    console.print(table_of(results))
    num_wrong = sum(result.num_wrong for result in results)
    console.print(f"wrong streams: {num_wrong}; blocks leaked: {num_leaked}")
    console.print(f"longest re-prefill: {REPREFILL_S:.3f} s")
    if arguments.json:
        told: dict[str, Any] = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "commit": describe_commit(),
            "faults": [asdict(result) for result in results],
            "num_leaked_blocks": num_leaked,
        }
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")
    return 1 if num_wrong or num_leaked else 0


if __name__ == "__main__":
    sys.exit(main())
