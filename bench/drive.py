"""Open-loop load: each request is sent when due, regardless of the others. Also runs a whole plan,
on clusters started for it or on a running gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from baton.client import AsyncClient, Chunk, SamplingParams
from baton.config import ServeOptions
from baton.config.load import load_options
from baton.errors import BatonError
from baton.supervisor import Cluster
from bench.measure import Record, Slo, summarise
from bench.plan import LoadOptions, Run, entries_of, load_of, runs_of
from bench.report import Point
from bench.workload import LoadRequest
from engine.plan.trace import TraceEntry


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """cache_salt: loads with different salts share no cached prefix. timeout_s: deadline of a
    request, in seconds."""

    model: str = ""
    cache_salt: str = ""
    timeout_s: float = 600.0
    temperature: float = 0.0


async def drive(
    client: AsyncClient, requests: Sequence[LoadRequest], options: DriveOptions
) -> tuple[Record, ...]:
    """Send all requests, each at its time; returns their records in the same order, including
    failures."""

    async def ask(request: LoadRequest, now: Callable[[], float]) -> Record:
        return await _measure(client, request, options, now)

    return await drive_each(requests, ask)


async def drive_each(
    requests: Sequence[LoadRequest],
    ask: Callable[[LoadRequest, Callable[[], float]], Awaitable[Record]],
) -> tuple[Record, ...]:
    """Ask for all requests, each at its time; returns their records in the same order. ask: is
    given a clock of seconds from the start, and records failures."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    def now() -> float:
        return loop.time() - start_s

    async def run(request: LoadRequest) -> Record:
        # Waits for the due time: the only sleep in an open loop.
        await asyncio.sleep(request.due_s - now())
        return await ask(request, now)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(request)) for request in requests]
    return tuple(task.result() for task in tasks)


async def _measure(
    client: AsyncClient, request: LoadRequest, options: DriveOptions, now: Callable[[], float]
) -> Record:
    params = SamplingParams(
        max_tokens=request.num_output_tokens, temperature=options.temperature, ignore_eos=True
    )
    pieces: list[tuple[float, int]] = []
    last: Chunk | None = None
    error = ""
    sent_s = now()
    try:
        async with client.stream(
            request.prompt_token_ids,
            params,
            model=options.model,
            cache_salt=options.cache_salt,
            timeout_s=options.timeout_s,
        ) as stream:
            async for chunk in stream:
                if chunk.token_ids:
                    pieces.append((now(), len(chunk.token_ids)))
                last = chunk
    except BatonError as failure:
        error = failure.reason
    usage = last.usage if last else None
    timing = last.timing if last else None
    return Record(
        due_s=request.due_s,
        sent_s=sent_s,
        end_s=now(),
        num_prompt_tokens=len(request.prompt_token_ids),
        pieces=tuple(pieces),
        error=error,
        num_cached_tokens=max(usage.cached_tokens, usage.decode_cached_tokens) if usage else 0,
        transfer_bytes=timing.transfer_bytes if timing else 0,
        transfer_exposed_ms=timing.transfer_exposed_ms if timing else 0.0,
        was_handed_over=bool(timing and timing.transfer_bytes),
    )


@asynccontextmanager
async def meanwhile(*work: Awaitable[object]) -> AsyncIterator[None]:
    """Run in the background of the block, from 1 s before it; cancelled at its end. Raises what the
    work raised, except BatonError."""
    tasks = [asyncio.ensure_future(each) for each in work]
    await asyncio.sleep(1.0)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, BatonError):
                raise result


#: SPLIT: tiers share prompts by load. APART: the prefill tier computes all prompts.
SPLIT, APART, COLOCATED, GIVEN = "split", "apart", "colocated", "given"

#: Maximum missing tokens that a decode worker computes itself: a tail within a block.
_APART_TOKENS = 16


def cluster_options(
    model: str, settings: Mapping[str, object], compares: bool
) -> dict[str, ServeOptions]:
    """Options of `baton serve` by target name. Raises ConfigError.

    settings: options by field name, as in a YAML file of `baton serve`. compares: also measure the
    same number of colocated workers.
    """
    base: dict[str, object] = {"log_level": "warning", **settings, "model": model, "port": 0}
    if not compares:
        options = load_options(ServeOptions, base)
        return {COLOCATED if options.colocated else SPLIT: options}
    split = load_options(ServeOptions, {**base, "colocated": False})
    only_split = {"num_prefill_workers", "prefill_block_size"}
    alone = {name: value for name, value in base.items() if name not in only_split}
    num_workers = split.num_prefill_workers + split.num_decode_workers
    colocated = load_options(
        ServeOptions, {**alone, "colocated": True, "num_decode_workers": num_workers}
    )
    return {SPLIT: split, COLOCATED: colocated}


def apart_options(model: str, settings: Mapping[str, object]) -> dict[str, ServeOptions]:
    """Options of a split with all prompts computed by the prefill tier, by name. Raises
    ConfigError."""
    options = {**settings, "colocated": False, "max_local_prefill_tokens": _APART_TOKENS}
    return {APART: cluster_options(model, options, compares=False)[SPLIT]}


@asynccontextmanager
async def started(
    clusters: Mapping[str, ServeOptions], given: str | None = None
) -> AsyncIterator[dict[str, AsyncClient]]:
    """Start the clusters, one after the other, and yield a client of each, by name. given: address
    of a running gateway. Raises StartupError."""
    async with AsyncExitStack() as stack:
        clients = {}
        if given:
            clients[GIVEN] = await stack.enter_async_context(AsyncClient(given, max_retries=0))
        for name, options in clusters.items():
            cluster = await stack.enter_async_context(Cluster(options))
            clients[name] = await stack.enter_async_context(
                AsyncClient(cluster.address, max_retries=0)
            )
        yield clients


#: Unmeasured sequential requests before the first run on a target.
NUM_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Session:
    """One call of the program. A rate of None means the trace's own."""

    load: LoadOptions
    rates: tuple[float | None, ...]
    num_repetitions: int
    slo: Slo


async def measure(session: Session, clients: Mapping[str, AsyncClient]) -> tuple[Point, ...]:
    """Run all of a session, with progress on stderr. clients: by target name. Raises BatonError,
    TraceError, ArrivalsError."""
    models = [await client.model() for client in clients.values()]
    vocab_size = min(model.vocab_size for model in models)
    entries = entries_of(session.load, min(model.max_model_len for model in models))
    for client in clients.values():
        await _warm_up(session, client, entries, vocab_size)
    points = []
    for run in runs_of(tuple(clients), session.rates, session.num_repetitions):
        points.append(await _point(session, clients[run.target], run, entries, vocab_size))
        summary = points[-1].summary
        sys.stderr.write(
            f"{run.target} at {points[-1].rate:g}/s: {summary.num_complete} of "
            f"{summary.num_requests} in {summary.duration_s:.0f} s\n"
        )
    return tuple(points)


async def _warm_up(
    session: Session, client: AsyncClient, entries: Sequence[TraceEntry], vocab_size: int
) -> None:
    run = Run("", session.rates[0], -1)
    requests, _ = load_of(session.load, entries, run, vocab_size)
    for request in requests[:NUM_WARM_UP]:
        alone = dataclasses.replace(request, due_s=0.0)
        await drive(client, (alone,), DriveOptions(cache_salt="warm"))


async def _point(
    session: Session,
    client: AsyncClient,
    run: Run,
    entries: Sequence[TraceEntry],
    vocab_size: int,
) -> Point:
    requests, rate = load_of(session.load, entries, run, vocab_size)
    # A new salt per run, so that no run hits prefixes cached by an earlier one.
    options = DriveOptions(cache_salt=secrets.token_hex(8))
    records = await drive(client, requests, options)
    return Point(run.target, rate, run.repetition, summarise(records, session.slo))
