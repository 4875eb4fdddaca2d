"""Where the gaps of steady answers are made, on their way from the engine of a decode worker to the
client.

    python -m bench.stations [MODEL] [--trace FILE] [--json FILE]

One cluster of two tiers, as in bench.split with --oracle-step-ms: the engine computes nothing, and
its step is asked to take a time that is known. Compared are what was asked for; how long a process
of its own sleeps that asks for as long, at the same time, which shows what the machine adds; the
engine's step; the time from the end of a step to that of the next; and the gaps at the client.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.client import AsyncClient, Model
from baton.config import ServeOptions
from baton.errors import BatonError
from baton.supervisor import Cluster
from baton.supervisor.plan import PROGRAMS, Programs
from bench.drive import SPLIT, cluster_options, drive
from bench.machine import document_of, now
from bench.measure import Distribution, Record, distribution
from bench.mixed_load import MixedLoad, Steady, mixed_load
from bench.peers.models import NAMES, checkpoint
from bench.plan import LoadOptions, entries_of
from bench.report import write_json
from bench.split import BASE_SETTINGS, engine_settings, run_options, warm_up
from bench.timed_worker import STEP_TIMES, StepTimes, read_steps
from bench.workload import TraceError

_WORKER = (sys.executable, "-m", "bench.timed_worker")


@dataclass(frozen=True, slots=True)
class Stations:
    """Milliseconds; of the steady answers' tokens, or of steps, each as often as it has sequences.

    late: how much longer than asked for the process slept. asked, engine: a step of the engine.
    worker: from the end of a step to the end of the next. client: gaps. first: the first of them in
    each answer, in which its KV is handed over.
    """

    late: Distribution
    asked: Distribution
    engine: Distribution
    worker: Distribution
    client: Distribution
    first: Distribution


def stations_of(
    steps: Sequence[StepTimes],
    late_ms: Sequence[float],
    steady: Sequence[Record],
    step_ms: float,
    token_us: float,
) -> Stations:
    """steps: in order."""
    return Stations(
        late=distribution(late_ms),
        asked=distribution(step_ms + n * token_us / 1e3 for _, _, n, ids in steps for _ in ids),
        engine=distribution((end - begin) * 1e3 for begin, end, _, ids in steps for _ in ids),
        worker=distribution(_gaps_ms(steps)),
        client=distribution(gap for record in steady for gap in record.itl_ms),
        first=distribution(gap for record in steady for gap in record.itl_ms[:1]),
    )


def _gaps_ms(steps: Sequence[StepTimes]) -> Iterator[float]:
    """Between the ends of the steps of a sequence that gave it one token after the other."""
    ends_s: dict[tuple[int, int], float] = {}
    for _, end_s, _, decoded in steps:
        for block_id, position in decoded:
            before_s = ends_s.pop((block_id, position - 1), None)
            if before_s is not None:
                yield (end_s - before_s) * 1e3
            ends_s[block_id, position] = end_s


@dataclass(frozen=True, slots=True)
class Plan:
    """rate: long prompts/s, for `seconds`."""

    steady: Steady
    long: LoadOptions
    rate: float
    seconds: float

    def load(self, model: Model) -> MixedLoad:
        """Raises TraceError, OSError."""
        entries = entries_of(self.long, model.max_model_len)
        num_long = max(self.long.burst_size, round(self.seconds * self.rate))
        some = [entries[index % len(entries)] for index in range(num_long)]
        size, seed = self.long.burst_size, self.long.seed
        return mixed_load(self.steady, some, self.rate, size, model.vocab_size, seed)


async def measure(options: ServeOptions, plan: Plan) -> Stations:
    """Start a cluster, load it and stop it. Raises BatonError, TraceError."""
    programs = Programs(PROGRAMS.prefill, _WORKER, PROGRAMS.gateway)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        os.environ[STEP_TIMES] = str(path)
        async with (
            Cluster(options, programs=programs) as cluster,
            AsyncClient(cluster.address, max_retries=0) as client,
        ):
            load = plan.load(await client.model())
            await warm_up(client, load)
            begin_s = time.monotonic()
            with _sleeper(options.oracle_step_ms / 1e3) as late_ms:
                records = await drive(client, (*load.steady, *load.bursts), run_options())
        steps = read_steps(path, begin_s)
    steady = records[: len(load.steady)]
    return stations_of(steps, late_ms, steady, options.oracle_step_ms, options.oracle_token_us)


@contextmanager
def _sleeper(asked_s: float) -> Iterator[list[float]]:
    """A process that sleeps for `asked_s` again and again; at the end, how many milliseconds longer
    it did."""
    late_ms: list[float] = []
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_sleep, args=(asked_s, theirs))
    process.start()
    theirs.close()
    try:
        yield late_ms
    finally:
        ours.send(None)
        late_ms += ours.recv()
        process.join()


def _sleep(asked_s: float, end: Connection) -> None:
    late_ms = []
    while not end.poll():
        begin_s = time.perf_counter()
        time.sleep(asked_s)
        late_ms.append((time.perf_counter() - begin_s - asked_s) * 1e3)
    end.send(late_ms)


def table_of(stations: Stations) -> Table:
    """One row each, milliseconds."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("station", no_wrap=True)
    for heading in ("p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for field in dataclasses.fields(stations):
        distribution: Distribution = getattr(stations, field.name)
        values = (distribution.p50, distribution.p90, distribution.p99, distribution.max)
        table.add_row(field.name, *(f"{value:.2f}" for value in values))
    return table


def main(
    model: Annotated[str, typer.Argument(metavar="[MODEL]")] = "box",
    trace: Annotated[Path | None, typer.Option(help="As of bench.split.")] = None,
    input_scale: Annotated[float, typer.Option(help="Factor on the trace's prompts.")] = 1.0,
    long_tokens: Annotated[int, typer.Option(min=1, help="Mean length, without a trace.")] = 2000,
    rate: Annotated[float, typer.Option(help="Long prompts/s.")] = 4.0,
    seconds: Annotated[float, typer.Option(help="Of bursts.")] = 10.0,
    steady_rate: Annotated[float, typer.Option(help="Short requests/s.")] = 6.0,
    oracle_step_ms: Annotated[float, typer.Option(min=0.1, help="Of each step.")] = 5.5,
    oracle_token_us: Annotated[float, typer.Option(min=0, help="Of each new token.")] = 20.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all results.")] = None,
) -> None:
    """Measure where gaps between tokens are made."""
    long = LoadOptions(
        num_requests=64,
        num_input_tokens=long_tokens,
        num_output_tokens=12,
        burst_size=4,
        trace=trace,
        input_scale=input_scale if trace else 1.0,
        output_scale=0.05 if trace else 1.0,
    )
    plan = Plan(Steady(rate=steady_rate), long, rate, seconds)
    folder = str(checkpoint(model, "bfloat16")) if model in NAMES else model
    settings = {**BASE_SETTINGS, **engine_settings(oracle_step_ms, oracle_token_us)}
    started_at = now()
    try:
        options = cluster_options(folder, settings, compares=True)[SPLIT]
        stations = asyncio.run(measure(options, plan))
    except (BatonError, TraceError, OSError) as error:
        raise SystemExit(f"stations: {error}") from None
    Console(width=100).print(table_of(stations))
    if json_path:
        data = {
            "engine": {"step_ms": oracle_step_ms, "token_us": oracle_token_us},
            "rate": rate,
            "stations": dataclasses.asdict(stations),
        }
        write_json(json_path, document_of("bench.stations", started_at, data))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m bench.stations")
