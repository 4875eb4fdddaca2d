"""Requests inside their latency targets: fixed shapes, two that are given the targets, and the
planner, which chooses between those two.

    python -m bench.slo [FILE[:SCALE] ...] [--rate 1 --rate 2 ...] [--seeds 3]
        [--doc docs/two_tiers.md]

A simulation: gateway, router, admission and worker cores are the real ones under a virtual clock;
steps take as long as a formula says. So the same call gives the same table on any machine. The
formula's times are of the 125m shape on two cores whose load varies: with them the median first
token of the split is 1.5 and 4.8 s at 2 and 4 requests/s, and colocated 0.6 and 2.2 s, where
servers on such a machine had 1.4 and 4.7, and 0.5 and 2.5 s.

FILE is a recorded load as bench.sharing reads it, its answers at half of their length: its requests
follow each other as recorded, at another rate, and share no prefix here.

Every shape first serves another load of the same kind, which is not counted: workers have measured
their steps then, and the planner has seen what comes. It begins with the split.

Goals: in each cell the planner is at most two points below the best fixed shape, and above it in
the mean; and at most two points below the better of the two shapes with targets.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from os import cpu_count
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from baton.types import NO_SLO, Slo, Tier
from bench import measure
from bench.fleet import runs
from bench.measure import Record
from bench.plan import poisson
from bench.sharing import load_of as recorded_load_of
from bench.suite.markdown import Goal, goal_line, table, write_part
from bench.workload import fitted
from engine.plan.trace import TraceEntry, TraceError, read_trace
from tests.support.sim_load import TIMED_SPEC, Arrival, Speed, records_of_load
from worker_core.policy import (
    Policy,
    colocated_prefill,
    decode_policy,
    learned_local_prefill,
    pinned_local_prefill,
    prefill_policy,
)

Workers = dict[str, tuple[Tier, Policy]]

#: A worker with one of two cores, and one with both.
_ONE_CORE = Speed(0.010, 0.0010, 0.0009, host_s=0.001, noise=0.08, noise_s=0.015)
_TWO_CORES = Speed(0.008, 0.0006, 0.00047, host_s=0.001, noise=0.08, noise_s=0.015)

RATES = (1.0, 2.0, 4.0)
#: The same for recorded loads.
RECORDED_RATES = (0.5, 1.0, 2.0, 4.0)
_OUTPUT_SCALE = 0.5
MAX_LOSS = 0.02
_SEED_BEFORE = 1000


@dataclass(frozen=True, slots=True)
class Targets:
    """In milliseconds."""

    name: str
    ttft_ms: float
    tpot_ms: float

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_ms / 1e3, self.tpot_ms / 1e3)

    @property
    def limits(self) -> measure.Slo:
        """For records of a client."""
        return measure.Slo(self.ttft_ms, self.tpot_ms)

    def share_of(self, records: Sequence[Record]) -> float:
        return fmean(self.limits.is_met_by(record) for record in records)


TARGETS = (
    Targets("early first token", 600, 200),
    Targets("short gaps", 3000, 30),
    Targets("both", 1200, 50),
)


@dataclass(frozen=True, slots=True)
class Load:
    """arrivals: what is counted. before: what is served first."""

    arrivals: Sequence[Arrival]
    before: Sequence[Arrival]


def load_of(rate: float, seed: int, num_requests: int) -> Load:
    """Prompts of 256 to 1,024 tokens, answers of 32 to 64."""

    def arrivals(seed: int) -> list[Arrival]:
        rng = random.Random(seed)
        return [
            Arrival(due_s, rng.randint(256, 1024), rng.randint(32, 64))
            for due_s in poisson(num_requests, rate, rng)
        ]

    return Load(arrivals(seed), arrivals(_SEED_BEFORE + seed))


def recorded_load(trace: Sequence[TraceEntry], rate: float, seed: int, num_requests: int) -> Load:
    """Two parts of a trace, other ones for each seed."""

    def arrivals(seed: int) -> list[Arrival]:
        return [
            Arrival(entry.arrival_s, entry.num_input_tokens, entry.num_output_tokens)
            for entry in runs.load_of(trace, rate, num_requests / rate, seed)
        ]

    return Load(arrivals(seed), arrivals(_SEED_BEFORE + seed))


@dataclass(frozen=True, slots=True)
class Shape:
    """Workers of a machine with two cores. speed: of each. max_num_batched_tokens: of a step.
    options: more of LoadCluster."""

    speed: Speed
    workers: Callable[[Slo], Workers]
    max_num_batched_tokens: int = 2048
    options: Mapping[str, Any] = field(default_factory=dict)

    def records(self, load: Load, slo: Slo = NO_SLO) -> list[Record]:
        return records_of_load(
            load.arrivals,
            self.speed,
            self.workers(slo),
            load.before,
            targets=slo,
            max_num_batched_tokens=self.max_num_batched_tokens,
            **self.options,
        )


def _split(slo: Slo) -> Workers:
    decode = decode_policy(learned_local_prefill(TIMED_SPEC, slo))
    return {"p0": (Tier.PREFILL, prefill_policy(slo)), "d0": (Tier.DECODE, decode)}


def _apart(slo: Slo) -> Workers:
    decode = decode_policy(pinned_local_prefill(TIMED_SPEC.layout.block_size))
    return {"p0": (Tier.PREFILL, prefill_policy(slo)), "d0": (Tier.DECODE, decode)}


def _colocated(slo: Slo) -> Workers:
    return {"d0": (Tier.DECODE, decode_policy(colocated_prefill(TIMED_SPEC, slo)))}


def _chunked(_slo: Slo) -> Workers:
    policy = pinned_local_prefill(TIMED_SPEC.max_model_len, gap_rule=None)
    return {"d0": (Tier.DECODE, decode_policy(policy))}


FIXED = {
    "apart": Shape(_ONE_CORE, _apart),
    "split": Shape(_ONE_CORE, _split),
    "chunks of 64": Shape(_TWO_CORES, _chunked, 64),
    "chunks of 256": Shape(_TWO_CORES, _chunked, 256),
    "chunks of 2,048": Shape(_TWO_CORES, _chunked, 2048),
}
WITH_TARGETS = {
    "split with targets": Shape(_ONE_CORE, _split),
    "colocated with targets": Shape(_TWO_CORES, _colocated),
}
#: It may give one worker both cores.
PLANNED = Shape(_ONE_CORE, _split, options={"wide": _TWO_CORES, "is_steered": True})


@dataclass(frozen=True, slots=True)
class Cell:
    """Shares of requests inside the targets, by shape."""

    load: str
    rate: float
    targets: Targets
    fixed: Mapping[str, float]
    steered: Mapping[str, float]
    planned: float

    @property
    def gain(self) -> float:
        """Share of the planner, less that of the best fixed shape."""
        return self.planned - max(self.fixed.values())

    @property
    def choice(self) -> float:
        """Share of the planner, less that of the better shape with targets."""
        return self.planned - max(self.steered.values())


def cells_at(name: str, rate: float, loads: Sequence[Load]) -> list[Cell]:
    """One cell for each pair of targets."""
    fixed = {key: [shape.records(load) for load in loads] for key, shape in FIXED.items()}
    return [
        Cell(
            name,
            rate,
            targets,
            {shape: fmean(map(targets.share_of, records)) for shape, records in fixed.items()},
            {
                steered: fmean(targets.share_of(shape.records(load, targets.slo)) for load in loads)
                for steered, shape in WITH_TARGETS.items()
            },
            fmean(targets.share_of(PLANNED.records(load, targets.slo)) for load in loads),
        )
        for targets in TARGETS
    ]


def markdown(cells: Sequence[Cell], command: str) -> str:
    """The table, and whether the goals are met."""
    headings = ("load", "requests/s", "targets, ms", *FIXED, *WITH_TARGETS, "planned")
    rows = []
    for cell in cells:
        shares = (*cell.fixed.values(), *cell.steered.values(), cell.planned)
        best = max(shares)
        shown = [f"**{share:.0%}**" if share == best else f"{share:.0%}" for share in shares]
        targets = f"{cell.targets.name}: {cell.targets.ttft_ms:,.0f}, {cell.targets.tpot_ms:,.0f}"
        rows.append([cell.load, f"{cell.rate:g}", targets, *shown])
    gains = [cell.gain for cell in cells]
    goals = (
        goal_line(Goal("least gain over the best fixed shape, points", -2), {"": 100 * min(gains)}),
        goal_line(Goal("mean gain, points", 0), {"": 100 * fmean(gains)}),
        goal_line(
            Goal("least gain over the better shape with targets, points", -2),
            {"": 100 * min(cell.choice for cell in cells)},
        ),
    )
    return "\n".join([f"By `{command}`, simulated.\n", table(headings, rows), "", *goals])


def main(
    recorded: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE[:SCALE]]...", help="Recorded loads.")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests/s; may be repeated. [default: 1, 2, 4; recorded: 0.5, too]"),
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Of each run.")] = 40,
    seeds: Annotated[int, typer.Option(min=1, help="Loads for each cell.")] = 3,
    doc: Annotated[Path | None, typer.Option(help="Page with a part for the table.")] = None,
) -> None:
    """Simulate shapes with and without latency targets, and the planner."""
    jobs = [
        ("drawn", one, [load_of(one, seed, num_requests) for seed in range(seeds)])
        for one in rate or RATES
    ]
    for found in map(recorded_load_of, recorded or ()):
        try:
            entries = read_trace(found.path)
        except (TraceError, OSError) as error:
            raise SystemExit(f"slo: {error}") from None
        trace = [
            fitted(entry, found.scale, _OUTPUT_SCALE, TIMED_SPEC.max_model_len) for entry in entries
        ]
        jobs += [
            (
                found.name,
                one,
                [recorded_load(trace, one, seed, num_requests) for seed in range(seeds)],
            )
            for one in rate or RECORDED_RATES
        ]
    with ProcessPoolExecutor(cpu_count()) as pool:
        cells = [cell for found in pool.map(cells_at, *zip(*jobs, strict=True)) for cell in found]
    body = markdown(cells, " ".join(["python -m bench.slo", *map(_word, sys.argv[1:])]))
    typer.echo(body)
    if doc:
        write_part(doc, "slo", body)


def _word(text: str) -> str:
    """A word of the command line, without the folder of a file."""
    return text.rpartition("/")[2] if ".csv" in text or ".jsonl" in text else text


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m bench.slo")
