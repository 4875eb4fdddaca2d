"""`baton check --soak`: hours of mixed load on its own processes, to check that their resource
usage stays flat."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from baton.check.fault_load import Load, StreamRecord
from baton.check.faults import MAX_RETRIES, MAX_TOKENS, KnownRequest
from baton.check.requests import draw_requests
from baton.check.run import Shape, cluster_of, reference
from baton.client import AsyncClient, Model, SamplingParams
from baton.errors import BatonError
from baton.rpc.channel import aio_channel
from baton.supervisor import Cluster
from baton.v1 import worker_pb2, worker_pb2_grpc

CONCURRENCY = 8
#: Blocks per worker, and prefixes remembered by the gateway. Small, so that all are in use before
#: the warm-up ends; any growth afterwards is a leak.
NUM_BLOCKS, NUM_PREFIXES = 1024, 1024
SHAPE = Shape(
    "2+2 workers",
    {
        "prefill_block_size": 16,
        "decode_block_size": 16,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "max_remembered_prefixes": NUM_PREFIXES,
        "max_num_batched_tokens": 64,
        "num_prefill_workers": 2,
        "num_decode_workers": 2,
    },
    CONCURRENCY,
)

#: Share of requests with known output. The others are drawn anew each time, so that prefix caches
#: are overwritten, too.
KNOWN_SHARE = 0.5
#: Seconds between clients that disconnect in the middle of a stream.
DISCONNECT_EVERY_S = 2.0
SAMPLE_EVERY_S = 10.0
#: Share of the time that is excluded from the trends.
WARM_UP_SHARE = 0.2
#: Seconds after the last stream within which everything must be released.
LEDGER_S = 10.0

#: Maximum rise of the fitted line from the end of the warm-up to the end of the soak. For resident
#: memory: MiB, or 2 % of its mean if that is more.
BOUNDS: Mapping[str, float] = MappingProxyType(
    {
        "resident memory, MiB": 8.0,
        "file descriptors": 2.0,
        "threads": 2.0,
        "leased blocks": 0.05 * NUM_BLOCKS,
    }
)
_RSS = "resident memory, MiB"
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True, slots=True)
class Trend:
    """One quantity of one process after the warm-up. begins, ends: least-squares line at both
    ends."""

    process: str
    quantity: str
    begins: float
    ends: float
    largest: float
    bound: float

    @property
    def is_flat(self) -> bool:
        return self.ends - self.begins <= self.bound


@dataclass(frozen=True, slots=True)
class Held:
    """Resources in use: blocks with an owner, or orphaned; open tickets; and requests, of workers
    and gateways."""

    num_blocks: int
    num_tickets: int
    num_requests: int

    @property
    def is_nothing(self) -> bool:
        return not (self.num_blocks or self.num_tickets or self.num_requests)


@dataclass(slots=True)
class SoakCounts:
    """Client statistics. wrong: the first streams with missing, surplus or wrong tokens, or a wrong
    end. errors: by reason."""

    num_streams: int = 0
    num_tokens: int = 0
    num_cancelled: int = 0
    num_disconnects: int = 0
    num_wrong: int = 0
    wrong: str = ""
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, record: StreamRecord[KnownRequest]) -> None:
        """Count an ended stream."""
        record.compare(record.request.right)
        self.num_streams += 1
        self.num_tokens += record.history.num_tokens
        self.num_cancelled += not (record.is_whole or record.error)
        if record.error:
            self.errors[record.error] += 1
        if record.is_wrong:
            self.num_wrong += 1
            self.wrong = self.wrong or record.difference or record.disorder


@dataclass(frozen=True, slots=True)
class SoakVerdict:
    """Result of a soak. hours: duration of the load. deaths: restarted processes. held: resources
    still in use `LEDGER_S` after the last stream."""

    hours: float
    counts: SoakCounts
    trends: tuple[Trend, ...]
    deaths: tuple[str, ...]
    held: Held

    @property
    def is_sound(self) -> bool:
        is_flat = all(trend.is_flat for trend in self.trends)
        return is_flat and self.held.is_nothing and not (self.counts.num_wrong or self.deaths)


class Samples:
    """Resource usage of each process over time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._times_s: list[float] = []
        self._values: dict[tuple[str, str], list[float]] = {}
        self._pids = {name: cluster.pid_of(name) for name in cluster.names}
        self.deaths: list[str] = []

    def take(self, now_s: float, model: Model) -> None:
        """Sample all processes, including their descendants."""
        self._times_s.append(now_s)
        families = process_families()
        for name in self._cluster.names:
            pid = self._cluster.pid_of(name)
            if pid != self._pids[name]:
                self._pids[name] = pid
                self.deaths.append(name)
            for quantity, value in process_usage(families.get(pid, ())).items():
                self._values.setdefault((name, quantity), []).append(value)
        for worker in model.workers:
            key = (worker.worker_id, "leased blocks")
            self._values.setdefault(key, []).append(worker.num_leased_blocks)

    def trends(self, since_s: float) -> tuple[Trend, ...]:
        """Trends of the samples since `since_s`."""
        first = sum(at_s < since_s for at_s in self._times_s)
        return tuple(
            trend_of(process, quantity, self._times_s[first:], values[first:])
            for (process, quantity), values in self._values.items()
        )


def trend_of(
    process: str, quantity: str, times_s: Sequence[float], values: Sequence[float]
) -> Trend:
    """Fit a line. Requires at least two samples."""
    line = statistics.linear_regression(times_s, values)
    begins, ends = (line.intercept + line.slope * at_s for at_s in (times_s[0], times_s[-1]))
    bound = BOUNDS[quantity]
    if quantity == _RSS:
        bound = max(bound, 0.02 * statistics.fmean(values))
    return Trend(process, quantity, begins, ends, max(values), bound)


async def soak(
    options: Mapping[str, object],
    *,
    hours: float,
    num_requests: int,
    seed: int,
    on_progress: Callable[[float, SoakCounts], None],
) -> SoakVerdict:
    """Serve streams of every kind for `hours`, some of them cancelled or disconnected.
    num_requests: different requests with known output. on_progress: called after each hundredth of
    the time, with the hours so far."""
    known = [
        KnownRequest(request.prompt, request.params, right)
        for request, right in zip(
            *await reference(options, num_requests, seed, MAX_TOKENS), strict=True
        )
    ]
    counts = SoakCounts()
    async with (
        cluster_of(options, SHAPE) as cluster,
        AsyncClient(cluster.address, max_retries=MAX_RETRIES) as client,
    ):
        model = await client.model()

        def draw(rng: random.Random) -> KnownRequest:
            if rng.random() < KNOWN_SHARE:
                return rng.choice(known)
            (fresh,) = draw_requests(
                1, model.vocab_size, model.max_model_len, rng.getrandbits(63), MAX_TOKENS
            )
            return KnownRequest(fresh.prompt, fresh.params, None)

        samples = Samples(cluster)
        rng = random.Random(seed)
        start_s = time.monotonic()
        load = Load(client, draw, rng, CONCURRENCY, counts.add)
        breaker = asyncio.create_task(_disconnect_for_ever(cluster, rng, counts))
        shown = 0
        while (now_s := time.monotonic() - start_s) < hours * 3600:
            samples.take(now_s, await client.model())
            if (share := int(100 * now_s / (hours * 3600))) > shown:
                shown = share
                on_progress(now_s / 3600, counts)
            await asyncio.sleep(SAMPLE_EVERY_S)
        breaker.cancel()
        with suppress(asyncio.CancelledError):
            await breaker
        await load.stop()
        held = await _held_at_the_end(client)
    trends = samples.trends(hours * 3600 * WARM_UP_SHARE)
    return SoakVerdict(hours, counts, trends, tuple(samples.deaths), held)


async def _disconnect_for_ever(cluster: Cluster, rng: random.Random, counts: SoakCounts) -> None:
    """Disconnect in the middle of streams, alternately over gRPC and HTTP, until cancelled."""
    while True:
        await asyncio.sleep(DISCONNECT_EVERY_S)
        prompt = tuple(rng.randrange(64) for _ in range(rng.randint(1, 200)))
        with suppress(OSError, BatonError):
            if counts.num_disconnects % 2 and cluster.http_address:
                await _disconnect_http(cluster.http_address, prompt)
            else:
                await _disconnect_grpc(cluster.address, prompt)
        counts.num_disconnects += 1


async def _disconnect_grpc(address: str, prompt: tuple[int, ...]) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    async with AsyncClient(address, max_retries=0) as client:
        await anext(client.stream(prompt, params))


async def _disconnect_http(address: str, prompt: tuple[int, ...]) -> None:
    """Reset the connection after the first event."""
    body = json.dumps(
        {"prompt": prompt, "stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    ).encode()
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        await reader.readuntil(b"data: ")
    except asyncio.IncompleteReadError as error:
        raise ConnectionError(f"HTTP ended with {error.partial!r}") from error
    finally:
        writer.transport.abort()


async def _held_at_the_end(client: AsyncClient) -> Held:
    """Poll until nothing is held, at most `LEDGER_S`, and return the last value."""
    deadline_s = time.monotonic() + LEDGER_S
    while True:
        held = await _held(await client.model())
        if held.is_nothing or time.monotonic() > deadline_s:
            return held
        await asyncio.sleep(0.25)


async def _held(model: Model) -> Held:
    num_blocks = num_tickets = num_requests = 0
    for worker in model.workers:
        async with aio_channel(worker.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            ledger = await stub.ListBlocks(worker_pb2.ListBlocksRequest(), timeout=LEDGER_S)
        num_blocks += len(ledger.orphan_block_ids)
        num_blocks += len({block for owner in ledger.owners for block in owner.block_ids})
        num_tickets += sum(bool(owner.ticket_id) for owner in ledger.owners)
        num_requests += worker.num_running + worker.num_waiting + worker.num_in_flight
    return Held(num_blocks, num_tickets, num_requests)


def process_families() -> dict[int, list[Path]]:
    """Directories in /proc of each process and all its descendants, by process id, independent of
    sessions."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                # The process name before it may contain any characters, including brackets.
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(after_name[1])
    families: dict[int, list[Path]] = {}
    for pid in parents:
        elder: int | None = pid
        while elder:
            families.setdefault(elder, []).append(Path("/proc") / str(pid))
            elder = parents.get(elder)
    return families


def process_usage(folders: Sequence[Path]) -> dict[str, float]:
    """Total usage of the processes. A process that ends meanwhile is skipped."""
    rss = num_files = num_threads = 0.0
    for folder in folders:
        with suppress(OSError):
            pages = int((folder / "statm").read_text().split()[1])
            files, threads = len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))
            rss, num_files, num_threads = (
                rss + pages * _PAGE_MIB,
                num_files + files,
                num_threads + threads,
            )
    return {_RSS: rss, "file descriptors": num_files, "threads": num_threads}
