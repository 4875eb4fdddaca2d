"""Two tiers that share prompts by load, beside two workers apart and colocated, on recorded loads.

    python -m bench.sharing FILE[:SCALE] ... [--rate 2 --rate 4 ...] [--repeat 3]
        [--doc README.md] [--json FILE]

A load is a trace as `bench.load` reads it; SCALE multiplies the lengths of its prompts. All loads
go to all three clusters at every rate, one run after the other, clusters taking turns. Shown is the
share of requests inside the SLO, over all runs of a rate, and the median of the runs' 99th
percentiles of gaps between tokens. Two goals: the share is not below colocated's, and the
percentile at most 1.2 times that of the split that shares nothing.

--doc puts the table into a page, where its part "sharing" is. With the default rates, 40 requests a
run and three runs, two loads take a quarter of an hour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from baton.config import ServeOptions
from baton.errors import BatonError
from bench.drive import (
    APART,
    COLOCATED,
    SPLIT,
    Session,
    apart_options,
    cluster_options,
    measure,
    started,
)
from bench.load import settings_of
from bench.machine import BUNDLED_MODEL, document_of, now, write_json
from bench.measure import Slo
from bench.plan import ArrivalsError, LoadOptions
from bench.report import Point
from bench.suite.markdown import about, table, write_part
from engine.plan.trace import TraceError

#: Maximum inter-token latency, relative to the split that shares nothing.
MAX_ITL_RATIO = 1.2
#: Requests/s, from idle to overload of two workers with one core each.
RATES = (2.0, 4.0, 8.0, 12.0)


@dataclass(frozen=True, slots=True)
class Load:
    """A recorded load. scale: factor of its prompts' lengths."""

    path: Path
    scale: float = 1.0

    @property
    def name(self) -> str:
        return self.path.stem if self.scale == 1 else f"{self.path.stem}, prompts * {self.scale:g}"


def load_of(text: str) -> Load:
    """Parse FILE or FILE:SCALE. Raises BadParameter."""
    path, _, scale = text.partition(":")
    try:
        load = Load(Path(path), float(scale or 1))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give FILE or FILE:SCALE, e.g. a.jsonl:0.06") from None
    if load.scale <= 0:
        raise typer.BadParameter(f"{text!r}: give a scale of more than 0")
    return load


@dataclass(frozen=True, slots=True)
class Cell:
    """One cluster at one rate. share: requests inside the SLO, over all runs. itl_ms: median of the
    runs' 99th percentiles."""

    share: float
    itl_ms: float

    @property
    def text(self) -> str:
        return f"{self.share:.1%}, {self.itl_ms:.1f} ms"


def cells_of(points: Sequence[Point], rate: float) -> dict[str, Cell]:
    """Cells of one load, by cluster. All runs have equally many requests."""
    found: dict[str, list[Point]] = {}
    for point in points:
        if point.rate == rate:
            found.setdefault(point.target, []).append(point)
    return {
        target: Cell(
            fmean(run.summary.slo_attainment for run in runs),
            median(run.summary.itl_ms.p99 for run in runs),
        )
        for target, runs in found.items()
    }


def row_of(name: str, rate: float, cells: Mapping[str, Cell]) -> list[str]:
    """A row of the table: measurements, and whether both goals are met."""
    shared, apart, colocated = (cells[target] for target in (SPLIT, APART, COLOCATED))
    missed = []
    if shared.share < colocated.share:
        missed.append("share")
    if shared.itl_ms > MAX_ITL_RATIO * apart.itl_ms:
        missed.append(f"gaps ({shared.itl_ms / apart.itl_ms:.2f} times)")
    goals = f"**{', '.join(missed)} missed**" if missed else "met"
    return [name, f"{rate:g}", shared.text, apart.text, colocated.text, goals]


def markdown(document: Mapping[str, Any], points: Mapping[str, Sequence[Point]]) -> str:
    """What was run, where, and the table. points: by the load's name."""
    headings = ("Load", "requests/s", SPLIT, APART, COLOCATED, "goals")
    rows = []
    for name, of_load in points.items():
        rates = sorted({point.rate for point in of_load})
        rows += [row_of(name, rate, cells_of(of_load, rate)) for rate in rates]
    what = (
        f"{document['repeat']} x {document['num_requests']} requests a cell; inside the "
        f"SLO: first token within {document['slo']['ttft_ms']:g} ms, "
        f"{document['slo']['tpot_ms']:g} ms per token after it."
    )
    return f"{about(document)} {what}\n\n{table(headings, rows)}"


async def measure_loads(
    sessions: Mapping[str, Session], clusters: Mapping[str, ServeOptions]
) -> dict[str, tuple[Point, ...]]:
    """One load after the other, on the same clusters. Raises BatonError, TraceError,
    ArrivalsError."""
    async with started(clusters) as clients:
        return {name: await measure(session, clients) for name, session in sessions.items()}


def main(
    loads: Annotated[list[str], typer.Argument(metavar="FILE[:SCALE]...")],
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests/s; may be repeated. [default: 2, 4, 8, 12]")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Of each run.")] = 40,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each rate.")] = 3,
    output_scale: Annotated[float, typer.Option(help="Factor on lengths of answers.")] = 0.5,
    ttft_slo_ms: Annotated[float, typer.Option(help="Longest time to first token.")] = 400.0,
    tpot_slo_ms: Annotated[float, typer.Option(help="Longest mean time per later token.")] = 20.0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Option of `baton serve`."),
    ] = None,
    doc: Annotated[Path | None, typer.Option(help="Page with a part for the table.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all results.")] = None,
) -> None:
    """Measure whether sharing prompts by load pays."""
    started_at = now()
    slo = Slo(ttft_slo_ms, tpot_slo_ms)
    rates = tuple(rate or RATES)
    sessions = {}
    for load in map(load_of, loads):
        options = LoadOptions(
            arrivals="trace",
            num_requests=num_requests,
            trace=load.path,
            input_scale=load.scale,
            output_scale=output_scale,
        )
        sessions[load.name] = Session(options, rates, repeat, slo)
    settings = settings_of(set_ or ())
    try:
        clusters = {
            **cluster_options(BUNDLED_MODEL, settings, compares=True),
            **apart_options(BUNDLED_MODEL, settings),
        }
        points = asyncio.run(measure_loads(sessions, clusters))
    except (BatonError, TraceError, ArrivalsError, OSError) as error:
        raise SystemExit(f"sharing: {error}") from None
    data = {
        "num_requests": num_requests,
        "repeat": repeat,
        "slo": asdict(slo),
        "points": {name: [asdict(point) for point in found] for name, found in points.items()},
    }
    document = document_of("bench.sharing", started_at, data)
    body = markdown(document, points)
    typer.echo(body)
    if json_path:
        write_json(json_path, document)
    if doc:
        write_part(doc, "sharing", body)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m bench.sharing")
