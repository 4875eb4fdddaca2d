"""An open loop: every request is sent when it is due, whatever has become of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.client import AsyncClient, Chunk, SamplingParams
from baton.errors import BatonError
from bench.measure import Record
from bench.workload import LoadRequest


@dataclass(slots=True)
class Progress:
    """What has happened so far; kept by `drive`, read by whoever shows it."""

    num_requests: int
    num_sent: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0

    @property
    def num_running(self) -> int:
        return self.num_sent - self.num_done


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """cache_salt: requests of loads with different salts share no cached prefix. timeout_s:
    deadline of a request."""

    model: str = ""
    cache_salt: str = ""
    timeout_s: float = 600.0
    temperature: float = 0.0


async def drive(
    client: AsyncClient,
    requests: Sequence[LoadRequest],
    options: DriveOptions,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[Record, ...]:
    """Send all requests, each at its time, and measure them; in their order. A failed one is a
    record, too.

    on_progress: called at each change, with one and the same object.
    """
    loop = asyncio.get_running_loop()
    progress = Progress(len(requests))
    start_s = loop.time()

    def now() -> float:
        return loop.time() - start_s

    async def run(request: LoadRequest) -> Record:
        # The one kind of sleep that an open loop is made of.
        await asyncio.sleep(request.due_s - now())
        progress.num_sent += 1
        on_progress(progress)
        record = await _measure(client, request, options, now)
        progress.num_done += 1
        progress.num_failed += not record.is_complete
        progress.num_output_tokens += record.num_output_tokens
        on_progress(progress)
        return record

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
    return _record(request, sent_s, now(), tuple(pieces), error, last)


def _record(
    request: LoadRequest,
    sent_s: float,
    end_s: float,
    pieces: tuple[tuple[float, int], ...],
    error: str,
    last: Chunk | None,
) -> Record:
    usage = last.usage if last else None
    timing = last.timing if last else None
    return Record(
        due_s=request.due_s,
        sent_s=sent_s,
        end_s=end_s,
        num_prompt_tokens=len(request.prompt_token_ids),
        pieces=pieces,
        error=error,
        num_cached_tokens=max(usage.cached_tokens, usage.decode_cached_tokens) if usage else 0,
        transfer_bytes=timing.transfer_bytes if timing else 0,
        transfer_exposed_ms=timing.transfer_exposed_ms if timing else 0.0,
        was_handed_over=bool(timing and timing.transfer_bytes),
    )
