"""Simulated workers beside real processes, which serve the same small load.

    python -m bench.fleet.processes [--rate 6] [--num-requests 240] [--set NAME=VALUE ...]
        [--write docs/fleet.md]

Starts `baton serve` with two workers of each tier, then with four colocated ones, on oracle
engines, which take time and no CPU, and sends an open loop by gRPC. Then the cluster of bench.fleet
has the same load. Its steps take what the workers publish as fits of their recorded steps, its
handoffs what the answers say that they waited for KV.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Annotated

import typer

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.errors import BatonError, WorkerLost
from baton.rpc.channel import aio_channel
from baton.supervisor import ChildFailed, Cluster
from baton.types import Slo, StepCosts
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.wire import load_from_proto
from bench import measure
from bench.drive import COLOCATED, DriveOptions, cluster_options, drive
from bench.fleet.cluster import Answer, Shape
from bench.fleet.runs import Run, served
from bench.fleet.worker import Hardware
from bench.load import settings_of
from bench.machine import BUNDLED_MODEL, document_of, now
from bench.plan import poisson
from bench.suite.markdown import Goal, about, goal_line, number, table, write_part
from bench.workload import requests_of
from engine.plan.trace import TraceEntry
from worker_core.policy import (
    colocated_policy,
    decode_policy,
    learned_local_prefill,
    prefill_policy,
)

#: Part of the page that --write names.
PART = "fleet-processes"
MAX_DEVIATION = 10.0
_SLO = Slo(1.0, 0.05)
_STEP_MS, _TOKEN_US = 20.0, 200.0
_NUM_PLACES, _NUM_BLOCKS = 64, 2000
#: Requests before those that are compared, so that workers have measured.
_NUM_BEFORE = 60


@dataclass(frozen=True, slots=True)
class Means:
    """What the requests of one load had. goodput: answers inside the targets, per second."""

    ttft_ms: float
    tpot_ms: float
    goodput: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One shape on processes and simulated, and what the simulation was given."""

    shape: str
    processes: Means
    simulated: Means
    hardware: Hardware

    @property
    def deviations(self) -> tuple[float, float, float]:
        """In percent, signed: of the first token, of tokens after it, of goodput."""
        real, simulated = self.processes, self.simulated
        return (
            100 * (simulated.ttft_ms / real.ttft_ms - 1),
            100 * (simulated.tpot_ms / real.tpot_ms - 1),
            100 * (simulated.goodput / real.goodput - 1),
        )

    def rows(self) -> list[list[str]]:
        return [
            [self.shape, name, number(m.ttft_ms), number(m.tpot_ms), f"{m.goodput:.2f}"]
            for name, m in (("processes", self.processes), ("simulated", self.simulated))
        ]


def entries_of(num_requests: int, rate: float, seed: int) -> list[TraceEntry]:
    """Prompts of 256 to 1,024 tokens, answers of 16 to 96; rate: requests/s."""
    rng = Random(seed)
    return [
        TraceEntry(due_s, rng.randint(256, 1024), rng.randint(16, 96))
        for due_s in poisson(_NUM_BEFORE + num_requests, rate, rng)
    ]


async def on_processes(
    options: ServeOptions, entries: Sequence[TraceEntry]
) -> tuple[Means, Hardware]:
    """What clients of the processes see, and what the workers say of their steps. Raises
    BatonError."""
    async with Cluster(options) as cluster, AsyncClient(cluster.address, max_retries=0) as client:
        model = await client.model()
        due_s = [entry.arrival_s for entry in entries]
        requests = requests_of(entries, due_s, model.vocab_size, 0)
        records = await drive(client, requests, DriveOptions(cache_salt=secrets.token_hex(8)))
        workers = [cluster.address_of(n) for n in cluster.names if not n.startswith("gateway")]
        costs = [await _costs_of(address) for address in workers]
    for record in records:
        if record.error:
            raise WorkerLost(f"a request failed with {record.error}; give a lower --rate")
    counted = records[_NUM_BEFORE:]
    handed_over = [r.transfer_exposed_ms for r in counted if r.was_handed_over]
    means = Means(
        fmean(record.ttft_ms or 0.0 for record in counted),
        fmean(record.tpot_ms or 0.0 for record in counted if record.tpot_ms is not None),
        _per_second(
            sum(limits_of(_SLO).is_met_by(record) for record in counted),
            [record.due_s for record in counted],
        ),
    )
    hardware = Hardware(
        median_costs(costs),
        transfer_s=fmean(handed_over) / 1e3 if handed_over else 0.0,
        wire_bytes_per_s=float("inf"),
        num_blocks=options.num_gpu_blocks_override or 0,
        max_num_seqs=options.max_num_seqs,
    )
    return means, hardware


async def _costs_of(address: str) -> StepCosts:
    """As a worker publishes them with its next report."""
    async with aio_channel(address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).WatchLoad(worker_pb2.WatchLoadRequest())
        async for load in call:
            call.cancel()
            return load_from_proto(load).costs
    raise WorkerLost(f"the worker at {address} reports no load")


def median_costs(costs: Sequence[StepCosts]) -> StepCosts:
    """Medians over the workers that have measured them, as the planner takes them."""

    def middle(values: Sequence[float]) -> float:
        known = [value for value in values if value]
        return median(known) if known else 0.0

    return StepCosts(
        middle([cost.step_s for cost in costs]),
        middle([cost.sequence_s for cost in costs]),
        middle([cost.prompt_s for cost in costs]),
        middle([cost.token_s for cost in costs]),
    )


def limits_of(slo: Slo) -> measure.Slo:
    return measure.Slo(1e3 * (slo.ttft_s or 0.0), 1e3 * (slo.tpot_s or 0.0))


def _per_second(count: int, due_s: Sequence[float]) -> float:
    return count / (due_s[-1] - due_s[0])


def simulated(shape: Shape, hardware: Hardware, entries: Sequence[TraceEntry]) -> Means:
    """The same load on workers of the simulation."""
    _, answers = served(Run(shape, hardware, _SLO, entries))
    counted: Sequence[Answer] = answers[_NUM_BEFORE:]
    return Means(
        1e3 * fmean(answer.first_s - answer.due_s for answer in counted),
        1e3 * fmean(answer.tpot_s for answer in counted),
        _per_second(sum(answer.is_inside(_SLO) for answer in counted), [a.due_s for a in counted]),
    )


def compared(shape: str, options: ServeOptions, entries: Sequence[TraceEntry]) -> Comparison:
    """One shape. Raises BatonError."""
    real, hardware = asyncio.run(on_processes(options, entries))
    spec = hardware.spec
    if shape == COLOCATED:
        policies = [colocated_policy(spec, _SLO)] * options.num_decode_workers
    else:
        policies = [prefill_policy(_SLO)] * options.num_prefill_workers
        policies += [decode_policy(learned_local_prefill(spec, _SLO))] * options.num_decode_workers
    return Comparison(shape, real, simulated(Shape(policies), hardware, entries), hardware)


def markdown(conditions: str, comparisons: Sequence[Comparison], rate: float) -> str:
    """The table, and whether the goal is met."""
    headings = ("shape", "on", "first token, ms", "a token after it, ms", "goodput, requests/s")
    rows = [row for comparison in comparisons for row in comparison.rows()]
    goal = Goal("largest deviation of the simulation, %", MAX_DEVIATION, is_at_most=True)
    worst = {c.shape: max(map(abs, c.deviations)) for c in comparisons}
    given = [
        f"* {c.shape}: steps of {1e3 * c.hardware.costs.step_s:.1f} ms and "
        f"{1e3 * c.hardware.costs.sequence_s:.2f} ms a sequence, prompts "
        f"{1e3 * c.hardware.costs.prompt_s:.1f} ms and {1e3 * c.hardware.costs.token_s:.3f} ms a "
        f"token, {1e3 * c.hardware.transfer_s:.1f} ms for KV."
        for c in comparisons
    ]
    what = f"{rate:g} requests/s; inside: first token within {_SLO.ttft_s:g} s, then "
    what += f"{1e3 * (_SLO.tpot_s or 0):g} ms a token."
    return "\n".join(
        [f"{conditions} {what}", "", table(headings, rows), "", *given, goal_line(goal, worst)]
    )


def main(
    rate: Annotated[float, typer.Option(help="Requests/s.")] = 6.0,
    num_requests: Annotated[int, typer.Option(min=10, help="That are compared.")] = 240,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Option of `baton serve`."),
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Page with a part for the table.")] = None,
) -> None:
    """Compare the simulation with processes."""
    started_at = now()
    settings = {
        "engine": "oracle",
        "oracle_step_ms": _STEP_MS,
        "oracle_token_us": _TOKEN_US,
        "max_num_seqs": _NUM_PLACES,
        "num_gpu_blocks_override": _NUM_BLOCKS,
        "num_prefill_workers": 2,
        "num_decode_workers": 2,
        "slo_ttft_ms": 1e3 * (_SLO.ttft_s or 0.0),
        "slo_tpot_ms": 1e3 * (_SLO.tpot_s or 0.0),
        **settings_of(set_ or ()),
    }
    entries = entries_of(num_requests, rate, 0)
    try:
        comparisons = [
            compared(name, options, entries)
            for name, options in cluster_options(BUNDLED_MODEL, settings, compares=True).items()
        ]
    except ChildFailed as error:
        raise SystemExit("\n".join((*error.last_lines, f"processes: {error}"))) from None
    except (BatonError, OSError) as error:
        raise SystemExit(f"processes: {error}") from None
    conditions = about(document_of("bench.fleet.processes", started_at, {}))
    body = markdown(conditions, comparisons, rate)
    typer.echo(body)
    if write:
        write_part(write, PART, body)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m bench.fleet.processes")
