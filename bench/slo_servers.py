"""Requests inside their latency targets on real servers, by HTTP: fixed shapes, and the planner.

    python -m bench.slo_servers [--rate 1 --rate 2 ...] [--input-scale 0.3] [--target-scale 2]
        [--repeat 1] [--json FILE] [--doc docs/two_tiers.md]

The grid of bench.slo, measured: the 125m shape with random weights, an open loop of completions
over HTTP, prompts of 256 to 1,024 tokens (times --input-scale) and answers of 32 to 64. All servers
are up at once, and take turns at each rate: five fixed shapes, the same requests for all targets;
and for each pair of targets a split with `--planner on`. Every run first serves another load of the
same kind, which is not counted. One fixed shape takes two turns: the difference is the noise.
--target-scale is for machines on which a step alone takes longer than a target allows.

--json adds to the file: with the same file, rates may be measured in several calls, and the table
has all of them. Eight servers take about 15 GiB. One rate takes
9 * (before + num-requests) / rate seconds and what the servers need longer, and two minutes to
start.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from baton.config import ServeOptions
from baton.errors import BatonError
from baton.supervisor import ChildFailed, Cluster
from bench.drive import APART, SPLIT, apart_options, cluster_options
from bench.drive_http import drive_http
from bench.machine import document_of, now, write_json
from bench.measure import Record, summarise
from bench.peers.models import NAMES, checkpoint
from bench.plan import poisson, runs_of
from bench.slo import MAX_LOSS, RATES, TARGETS, Targets
from bench.suite.markdown import Goal, about, goal_line, table, write_part
from bench.workload import LoadRequest, fitted, requests_of
from engine.plan.trace import TraceEntry

CHUNKS = (64, 256, 2048)
#: The shape that takes two turns.
AGAIN = f"{SPLIT}, again"
PLANNED = "planned"
#: Tokens of the longest request.
_MAX_MODEL_LEN = 1024 + 64
_MAX_NUM_SEQS = 32
#: Token ids are below this, which every model here has.
_VOCAB_SIZE = 250


@dataclass(frozen=True, slots=True)
class Load:
    """Parameters of each run. num_before: requests that are served first and not counted."""

    num_requests: int
    num_before: int
    input_scale: float

    def requests(
        self, rate: float, seed: str, number: int, vocab_size: int
    ) -> tuple[LoadRequest, ...]:
        """Prompts of 256 to 1,024 tokens before scaling, answers of 32 to 64."""
        rng = random.Random(f"{seed}/{rate}")
        entries = [
            fitted(
                TraceEntry(0.0, rng.randint(256, 1024), rng.randint(32, 64)),
                *(self.input_scale, 1.0, _MAX_MODEL_LEN),
            )
            for _ in range(number)
        ]
        return requests_of(entries, poisson(number, rate, rng), vocab_size, rng.getrandbits(32))


@dataclass(frozen=True, slots=True)
class Cell:
    """Shares of requests inside a pair of targets, by fixed shape. again: of the shape that took
    two turns."""

    rate: float
    targets: Targets
    fixed: Mapping[str, float]
    again: float
    planned: float

    @property
    def gain(self) -> float:
        """Share of the planner, less that of the best fixed shape."""
        return self.planned - max(self.fixed.values())

    @property
    def noise(self) -> float:
        """Difference between two turns of the same shape."""
        return abs(self.again - self.fixed[SPLIT])

    def row(self) -> list[str]:
        best = max(*self.fixed.values(), self.planned)
        shares = (*self.fixed.values(), self.planned)
        shown = [f"**{share:.0%}**" if share == best else f"{share:.0%}" for share in shares]
        of = f"{self.targets.name}: {self.targets.ttft_ms:,.0f}, {self.targets.tpot_ms:,.0f}"
        points = (f"{100 * self.gain:+.1f}", f"{100 * self.noise:.1f}")
        return [f"{self.rate:g}", of, *shown, *points]


def scaled(factor: float) -> tuple[Targets, ...]:
    """The targets of bench.slo times a factor, for slower machines."""
    return tuple(
        replace(t, ttft_ms=factor * t.ttft_ms, tpot_ms=factor * t.tpot_ms) for t in TARGETS
    )


def servers(
    model: str, kv_bytes: int, all_targets: Sequence[Targets] = TARGETS
) -> dict[str, ServeOptions]:
    """Options of `baton serve` by contender, each with two cores and `kv_bytes` for KV. Raises
    ConfigError."""
    both = {
        "speculative_method": "none",
        "max_model_len": _MAX_MODEL_LEN,
        "max_num_seqs": _MAX_NUM_SEQS,
        "kv_cache_memory_bytes": kv_bytes // 2,
        "swap_space": 0.0,
    }
    alone = {**both, "colocated": True, "num_decode_workers": 1, "kv_cache_memory_bytes": kv_bytes}

    def one(settings: Mapping[str, object]) -> ServeOptions:
        (options,) = cluster_options(model, settings, compares=False).values()
        return options

    return {
        **apart_options(model, both),
        SPLIT: one(both),
        **{
            f"chunks of {chunk:,}": one({**alone, "max_num_batched_tokens": chunk})
            for chunk in CHUNKS
        },
        **{
            _planned(targets): one(
                {
                    **both,
                    "planner": "on",
                    "slo_ttft_ms": targets.ttft_ms,
                    "slo_tpot_ms": targets.tpot_ms,
                }
            )
            for targets in all_targets
        },
    }


def _planned(targets: Targets) -> str:
    return f"{PLANNED}: {targets.name}"


async def measure(
    options: Mapping[str, ServeOptions], rates: Sequence[float], num_repetitions: int, load: Load
) -> dict[float, dict[str, list[Record]]]:
    """Records by rate and contender. Raises BatonError."""
    found: dict[float, dict[str, list[Record]]] = {rate: {} for rate in rates}
    async with AsyncExitStack() as stack:
        clusters = {
            name: await stack.enter_async_context(Cluster(one)) for name, one in options.items()
        }
        clusters[AGAIN] = clusters[SPLIT]
        for run in runs_of((*options, AGAIN), rates, num_repetitions):
            rate, address = run.rate or 0.0, clusters[run.target].http_address
            for seed, number in (("before", load.num_before), ("counted", load.num_requests)):
                of_run = load.requests(rate, f"{seed}/{run.repetition}", number, _VOCAB_SIZE)
                records = await drive_http(address, of_run, secrets.token_hex(8))
            found[rate].setdefault(run.target, []).extend(records)
            failed = sum(not record.is_complete for record in records)
            sys.stderr.write(f"{run.target} at {rate:g}/s: {failed} of {len(records)} failed\n")
    return found


def cells_at(
    rate: float,
    records: Mapping[str, Sequence[Record]],
    all_targets: Sequence[Targets] = TARGETS,
) -> list[Cell]:
    """One cell for each pair of targets."""
    fixed = [APART, SPLIT, *(f"chunks of {chunk:,}" for chunk in CHUNKS)]
    return [
        Cell(
            rate,
            targets,
            {name: targets.share_of(records[name]) for name in fixed},
            targets.share_of(records[AGAIN]),
            targets.share_of(records[_planned(targets)]),
        )
        for targets in all_targets
    ]


def markdown(documents: Sequence[Mapping[str, Any]]) -> str:
    """Conditions of each call, the table of all, and whether the goals are met."""
    cells = sorted(
        (
            Cell(**{**cell, "targets": Targets(**cell["targets"])})
            for document in documents
            for cell in document["cells"]
        ),
        key=lambda cell: cell.rate,
    )
    headings = (
        *("requests/s", "targets, ms", *cells[0].fixed, PLANNED),
        *("gain, points", "noise, points"),
    )
    gains = [100 * cell.gain for cell in cells]
    noise = fmean(100 * cell.noise for cell in cells)
    goals = (
        goal_line(
            Goal("least gain over the best fixed shape, points", -100 * MAX_LOSS), {"": min(gains)}
        ),
        goal_line(Goal("mean gain, points", 0), {"": fmean(gains)}),
        f"* noise: {noise:.1f} points between two turns of one shape, in the mean.",
    )
    conditions = [
        f"{about(each)} {each['repeat']} x {each['load']['num_requests']} requests a cell, after "
        f"{each['load']['num_before']} that do not count; prompts * {each['load']['input_scale']:g}"
        for each in documents
    ]
    rows = [cell.row() for cell in cells]
    return "\n\n".join((*conditions, table(headings, rows), "\n".join(goals)))


def merged(path: Path | None, document: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents of a file, but for rates measured anew, and this one."""
    measured = {cell["rate"] for cell in document["cells"]}
    kept = []
    if path and path.exists():
        for other in json.loads(path.read_text(encoding="utf-8"))["documents"]:
            cells = [cell for cell in other["cells"] if cell["rate"] not in measured]
            kept += [{**other, "cells": cells}] if cells else []
    return [*kept, document]


def main(
    model: Annotated[str, typer.Argument(metavar="[MODEL]")] = "125m",
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests/s; may be repeated. [default: 1, 2, 4]")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=2, help="Of each run.")] = 40,
    before: Annotated[int, typer.Option(min=1, help="Requests that do not count.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 1,
    input_scale: Annotated[float, typer.Option(help="Factor on lengths of prompts.")] = 1.0,
    target_scale: Annotated[float, typer.Option(help="Factor on all targets.")] = 1.0,
    kv_mib: Annotated[int, typer.Option(min=64, help="KV memory of each server.")] = 768,
    json_path: Annotated[Path | None, typer.Option("--json", help="Add all results.")] = None,
    doc: Annotated[Path | None, typer.Option(help="Page with a part for the table.")] = None,
) -> None:
    """Measure servers with and without latency targets."""
    started_at = now()
    folder = str(checkpoint(model, "bfloat16")) if model in NAMES else model
    load = Load(num_requests, before, input_scale)
    rates, targets = tuple(rate or RATES), scaled(target_scale)
    try:
        options = servers(folder, kv_mib << 20, targets)
        found = asyncio.run(measure(options, rates, repeat, load))
    except ChildFailed as error:
        raise SystemExit("\n".join((*error.last_lines, f"slo_servers: {error}"))) from None
    except (BatonError, OSError) as error:
        raise SystemExit(f"slo_servers: {error}") from None
    cells = [cell for one in rates for cell in cells_at(one, found[one], targets)]
    runs = [
        {"rate": one, "contender": name, **asdict(summarise(records, targets[0].limits))}
        for one in rates
        for name, records in found[one].items()
    ]
    data = {
        "repeat": repeat,
        "load": asdict(load),
        "cells": [asdict(cell) for cell in cells],
        "runs": runs,
    }
    documents = merged(json_path, document_of("bench.slo_servers", started_at, data))
    body = markdown(documents)
    typer.echo(body)
    if json_path:
        write_json(json_path, {"documents": documents})
    if doc:
        write_part(doc, "slo-servers", body)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m bench.slo_servers")
