"""A fleet under recorded loads: the planner beside fixed shapes.

    python -m bench.fleet LOAD ... [--workers 8] [--seconds 60] [--factor 0.7 --factor 10 ...]
        [--ttft-ms 3000 --tpot-ms 30] [--seeds 2] [--write docs/fleet.md]
    python -m bench.fleet TRACE ... --day [--write docs/fleet.md]

A simulation (bench/fleet): dispatcher, admission, router and planner of the gateway, and
schedulers, costs and policies of the workers are the real code under a virtual clock. A step takes
as long as `--costs` say: what workers publish as fits of their recorded steps. What is left out of
a worker is compared with whole worker cores in the same run, on a small load.

LOAD is a file as engine/plan/trace.py reads it, or several, joined by "+", that follow one another:
a load that changes. Load factors are relative to an estimate of what the fleet can do with a trace
(runs.capacity). Each contender starts cold; the first 30 % of a run do not count.

Contenders: the best of some fixed splits; colocated workers with chunks of one size that take the
next request by the fewest sequences, and by cached prefixes (the best of two sizes); colocated
workers that keep the targets; and the planner, which begins with these.

--day runs the planner alone, through one wave of load on a large and a busy fleet, in which workers
are lost (bench/fleet/day.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from baton.types import Slo, StepCosts
from bench.fleet.contenders import families
from bench.fleet.day import markdown as days
from bench.fleet.runs import Figures, Run, capacity, figures_of, load_in_turn
from bench.fleet.validation import Deviation, deviations
from bench.fleet.worker import Hardware
from bench.suite.markdown import Goal, goal_line, number, table, write_part
from engine.plan.trace import TraceEntry, read_trace

#: By the roofline: a model of 8 billion parameters in 16 bits on an H100.
H100_8B = "0.0085,0.00012,0.0085,0.00005"
PLANNED, SPLIT = "planned", "static split"
FACTORS = (0.5, 0.8, 1.0, 10.0)
#: The same for loads that change.
CHANGING_FACTORS = (0.8,)
#: From this load factor on, a load is an overload: the planner is measured alone, with one seed.
OVERLOAD = 5.0


@dataclass(frozen=True, slots=True)
class Load:
    """Traces that follow one another, as long each; one: a load that does not change."""

    name: str
    traces: Sequence[Sequence[TraceEntry]]

    @classmethod
    def of(cls, paths: str) -> Load:
        """paths: joined by "+"."""
        names = [*map(Path, paths.split("+"))]
        read = {path: read_trace(path) for path in names}
        return cls(", ".join(path.stem for path in names), [read[path] for path in names])

    @property
    def is_changing(self) -> bool:
        return len(self.traces) > 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One load and contender. shape: the best of the contender's, by goodput. runs: by seed."""

    trace: str
    factor: float
    contender: str
    shape: str
    runs: Sequence[Figures]
    is_changing: bool = False

    @property
    def goodput(self) -> float:
        return fmean(run.goodput for run in self.runs)

    @property
    def spread(self) -> float:
        """Half of the range of goodput over the seeds, as a share of the mean."""
        values = [run.goodput for run in self.runs]
        return (max(values) - min(values)) / 2 / max(1e-9, self.goodput)

    def row(self) -> list[str]:
        runs = self.runs
        return [
            self.trace,
            f"{self.factor:g}",
            self.contender,
            self.shape,
            f"{self.goodput:.2f} ± {self.spread:.0%}",
            f"{fmean(run.attainment for run in runs):.0%}",
            number(fmean(run.worker_hours for run in runs)),
            f"{fmean(run.hit_share for run in runs):.0%}",
            number(fmean(run.sent_bytes for run in runs) / 1e9),
            number(fmean(run.num_changes for run in runs)),
            f"{fmean(run.refused for run in runs):.0%}",
        ]


HEADINGS = (
    "trace",
    "load",
    "contender",
    "shape",
    "goodput, requests/s",
    "inside",
    "worker-hours",
    "hits",
    "GB handed over",
    "role changes",
    "refused",
)


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated."""

    hardware: Hardware
    num_workers: int
    slo: Slo
    seconds: float
    num_seeds: int


def cells_of(load: Load, fleet: Fleet, factors: Sequence[float]) -> list[Cell]:
    """All contenders under one load."""
    rates = [
        capacity(trace[:4000], fleet.hardware, fleet.num_workers, fleet.slo)
        for trace in load.traces
    ]
    shapes = families(fleet.hardware, fleet.num_workers, fleet.slo)
    keys, runs = [], []
    for factor in factors:
        for seed in range(fleet.num_seeds):
            of_factor = [factor * rate for rate in rates]
            entries = load_in_turn(load.traces, of_factor, fleet.seconds, seed)
            for contender, tried in shapes.items():
                if factor >= OVERLOAD and (contender != PLANNED or seed):
                    continue
                for name, shape in tried.items():
                    keys.append((factor, contender, name))
                    runs.append(Run(shape, fleet.hardware, fleet.slo, entries, seed))
    with ProcessPoolExecutor(cpu_count()) as pool:
        figures = list(pool.map(figures_of, runs))
    cells = []
    for factor in factors:
        for contender, tried in shapes.items():
            found = [
                Cell(
                    load.name,
                    factor,
                    contender,
                    name,
                    [
                        f
                        for key, f in zip(keys, figures, strict=True)
                        if key == (factor, contender, name)
                    ],
                    load.is_changing,
                )
                for name in tried
            ]
            if found[0].runs:
                cells.append(max(found, key=lambda cell: cell.goodput))
    return cells


def gains_of_change(cells: Sequence[Cell]) -> Mapping[str, float]:
    """Goodput of the planner relative to the best static split's, by load that changes."""
    changing = [cell for cell in cells if cell.is_changing]
    splits = {(c.trace, c.factor): c.goodput for c in changing if c.contender == SPLIT}
    return {
        f"{cell.trace} at {cell.factor:g}": cell.goodput
        / max(1e-9, splits[cell.trace, cell.factor])
        for cell in changing
        if cell.contender == PLANNED
    }


def gains(cells: Sequence[Cell]) -> Mapping[str, float]:
    """Least goodput of the planner relative to each contender's, over the loads."""
    planned = {(c.trace, c.factor): c.goodput for c in cells if c.contender == PLANNED}
    least: dict[str, float] = {}
    for cell in cells:
        if cell.contender != PLANNED:
            gain = planned[cell.trace, cell.factor] / max(1e-9, cell.goodput)
            least[cell.contender] = min(gain, least.get(cell.contender, gain))
    return least


def markdown(cells: Sequence[Cell], checks: Sequence[Deviation], fleet: Fleet, command: str) -> str:
    """The table, and whether the goals are met."""
    slo = fleet.slo
    about = (
        f"By `{command}`, simulated: {fleet.num_workers} workers, {fleet.seconds:g} s of each "
        f"trace, {fleet.num_seeds} seeds; inside: first token within {slo.ttft_s:g} s, then "
        f"{1e3 * (slo.tpot_s or 0):g} ms a token. ±: half of the range over the seeds.\n"
    )
    goals = [
        goal_line(Goal("least goodput of the planner relative to", 1.0), gains(cells)),
        goal_line(
            Goal("deviation of simulated workers from whole worker cores, %", 10, is_at_most=True),
            {check.shape: 100 * check.worst for check in checks},
        ),
    ]
    if changed := gains_of_change(cells):
        goals.insert(1, goal_line(Goal("the same on loads that change", 1.15), changed))
    planned = [cell for cell in cells if cell.contender == PLANNED]
    overloads = [cell for cell in planned if cell.factor >= OVERLOAD]
    if overloads:
        peaks = {
            cell.trace: max(c.goodput for c in planned if c.trace == cell.trace) for cell in planned
        }
        kept = {cell.trace: 100 * cell.goodput / peaks[cell.trace] for cell in overloads}
        late = {cell.trace: max(run.refused_ms for run in cell.runs) for cell in overloads}
        goals += [
            goal_line(Goal("goodput under overload, % of the peak", 90), kept),
            goal_line(Goal("longest time to a refusal, ms", 50, is_at_most=True), late),
        ]
    return "\n".join(
        [
            about,
            table(HEADINGS, [cell.row() for cell in cells]),
            "",
            *goals,
            f"* a thousand requests took {_times(cells)} s of a core, with the planner "
            f"{_times(planned)}.",
        ]
    )


def _times(cells: Sequence[Cell]) -> str:
    """Least and greatest seconds of a core for a thousand requests."""
    took_s = [1000 * run.cpu_s / run.num_requests for cell in cells for run in cell.runs]
    return f"{min(took_s):.1f} to {max(took_s):.1f}"


def main(
    load: Annotated[
        list[str],
        typer.Argument(help="Recorded loads: .csv or .jsonl; joined by +, one after another."),
    ],
    workers: Annotated[int, typer.Option(min=2)] = 4,
    seconds: Annotated[float, typer.Option(min=1, help="Of each trace.")] = 60.0,
    hours: Annotated[float, typer.Option(min=0, help="The same, instead of --seconds.")] = 0.0,
    factor: Annotated[
        list[float] | None, typer.Option(help="Load factor; may be repeated.")
    ] = None,
    ttft_ms: Annotated[float, typer.Option(min=1)] = 3000.0,
    tpot_ms: Annotated[float, typer.Option(min=1)] = 30.0,
    seeds: Annotated[int, typer.Option(min=1, help="Parts of the trace.")] = 2,
    costs: Annotated[
        str, typer.Option(help="step_s,sequence_s,prompt_s,token_s of a worker.")
    ] = H100_8B,
    day: Annotated[
        bool, typer.Option("--day", help="One wave of load with failures; the planner alone.")
    ] = False,
    write: Annotated[Path | None, typer.Option(help="Page with a part for the table.")] = None,
) -> None:
    """Simulate a fleet."""
    hardware = Hardware(StepCosts(*map(float, costs.split(","))))
    slo = Slo(ttft_ms / 1e3, tpot_ms / 1e3)
    command = " ".join(["python -m bench.fleet", *_names(sys.argv[1:])])
    if day:
        part, body = "fleet-day", days([*map(Path, load)], hardware, slo, command)
    else:
        fleet = Fleet(hardware, workers, slo, 3600 * hours or seconds, seeds)
        cells = [
            cell
            for each in map(Load.of, load)
            for cell in cells_of(
                each, fleet, factor or (CHANGING_FACTORS if each.is_changing else FACTORS)
            )
        ]
        part, body = "fleet", markdown(cells, deviations(), fleet, command)
    typer.echo(body)
    if write:
        write_part(write, part, body)


def _names(words: Sequence[str]) -> list[str]:
    """Command-line words, traces by their names."""
    return [
        "+".join(Path(part).name for part in word.split("+"))
        if word.endswith((".csv", ".jsonl"))
        else word
        for word in words
    ]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m bench.fleet")
