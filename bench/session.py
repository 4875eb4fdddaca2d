"""A whole measurement: every run of a plan, on targets that are up for as long as it takes."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from baton.client import AsyncClient
from bench.drive import DriveOptions, Progress, drive
from bench.measure import Slo, summarise
from bench.plan import LoadOptions, Run, entries_of, load_of, runs_of
from bench.recorded import TraceEntry
from bench.report import Point

#: Requests that are sent one after the other before the first run on a target, and not measured.
NUM_WARM_UP = 3

Targets = AbstractAsyncContextManager[dict[str, AsyncClient]]


@dataclass(frozen=True, slots=True)
class Session:
    """One call of the program. rates: None stands for a trace's own."""

    load: LoadOptions
    rates: tuple[float | None, ...]
    num_repetitions: int
    slo: Slo
    timeout_s: float


async def measure(
    session: Session, targets: Targets, show: Callable[[Run, Progress], None]
) -> tuple[Point, ...]:
    """Run all of a session. show: called at each change within a run. Raises BatonError,
    TraceError, ArrivalsError."""
    async with targets as clients:
        models = {name: await client.model() for name, client in clients.items()}
        max_model_len = min(model.max_model_len for model in models.values())
        vocab_size = min(model.vocab_size for model in models.values())
        entries = entries_of(session.load, max_model_len)
        runs = runs_of(tuple(clients), session.rates, session.num_repetitions)
        for client in clients.values():
            await _warm_up(session, client, entries, vocab_size)
        points = [
            await _point(session, clients[run.target], run, entries, vocab_size, show)
            for run in runs
        ]
        return tuple(points)


async def _warm_up(
    session: Session, client: AsyncClient, entries: Sequence[TraceEntry], vocab_size: int
) -> None:
    run = Run("", session.rates[0], -1)
    requests, _ = load_of(session.load, entries, run, vocab_size)
    for request in requests[:NUM_WARM_UP]:
        alone = dataclasses.replace(request, due_s=0.0)
        await drive(client, (alone,), DriveOptions(timeout_s=session.timeout_s, cache_salt="warm"))


async def _point(
    session: Session,
    client: AsyncClient,
    run: Run,
    entries: Sequence[TraceEntry],
    vocab_size: int,
    show: Callable[[Run, Progress], None],
) -> Point:
    requests, rate = load_of(session.load, entries, run, vocab_size)
    # A salt of its own: a run finds no prefix that an earlier one has cached.
    options = DriveOptions(cache_salt=secrets.token_hex(8), timeout_s=session.timeout_s)
    records = await drive(client, requests, options, lambda progress: show(run, progress))
    return Point(run.target, rate, run.repetition, summarise(records, session.slo))
