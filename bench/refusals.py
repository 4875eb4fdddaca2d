"""Time to a refusal by each door, with latency targets: real processes far beyond their capacity.

    python -m bench.refusals [--set NAME=VALUE ...] [--times 5 --times 10 ...] [--for-s 20]
        [--deadline-s 5] [--ttft-ms 2000] [--tpot-ms 60] [--write docs/fleet.md]

Starts a gateway and a worker of each tier on oracle engines, which take time and little CPU,
measures their capacity by a closed loop, then sends open loops of `--times` as many requests/s, all
with the same deadline, by gRPC and by HTTP. A refusal is RESOURCE_EXHAUSTED, or status 429 with
Retry-After. Its time is that of the client, from sending the request to having read the answer, so
it includes both sides' work on the connection. bench.overload has goodput by load, and how good the
advice is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.errors import BatonError
from baton.supervisor import ChildFailed, Cluster
from bench.drive import DriveOptions, cluster_options, drive
from bench.drive_http import drive_http
from bench.load import settings_of
from bench.machine import BUNDLED_MODEL, document_of, now
from bench.measure import Record, Slo
from bench.overload import MAX_REFUSAL_MS, Level, capacity_of, level_of
from bench.plan import LoadOptions, Run, entries_of, load_of
from bench.suite.markdown import Goal, about, goal_line, number, table, write_part
from bench.threads import cpu_seconds
from bench.workload import LoadRequest

#: Of the page that --write names.
PART = "refusals"
#: Mean tokens of a prompt and of an answer, places of the decode worker, and its steps.
_LOAD, _NUM_PLACES, _STEP_MS = LoadOptions(num_input_tokens=64, num_output_tokens=32), 16, 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class DoorResult:
    """One load by one door. inside: answers per second of the load within both targets, counted as
    Level.goodput. cores: that were used, by gateway, workers and client."""

    door: str
    level: Level
    inside: float
    cores: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def row(self) -> list[str]:
        level = self.level
        return [
            self.door,
            f"{level.times:g}",
            number(level.rate),
            f"{level.num_requests:,}",
            number(level.goodput),
            number(self.inside),
            f"{level.num_refused:,}",
            f"{number(level.refusal_p50_ms)} / {number(level.refusal_p99_ms)} / "
            f"{number(level.refusal_max_ms)}",
            number(level.lag_p99_ms),
            " / ".join(f"{cores:.2f}" for cores in self.cores),
            ", ".join(f"{n} {why}" for why, n in level.late.items()) or "0",
        ]


HEADINGS = (
    "door",
    "times",
    "requests/s",
    "sent",
    "in time, requests/s",
    "inside, requests/s",
    "refused",
    "refused after, ms, p50 / p99 / longest",
    "client late, ms, p99",
    "cores: gateway / workers / client",
    "neither",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """times: of the capacity. for_s: of the load by each door. deadline_s: of each request."""

    times: tuple[float, ...]
    for_s: float
    deadline_s: float
    slo: Slo


def result_of(
    door: str, plan: Plan, times: float, rate: float, records: Sequence[Record]
) -> DoorResult:
    """Both counts of one load. times: of the capacity. rate: requests/s."""
    inside = [
        record if plan.slo.is_met_by(record) else dataclasses.replace(record, pieces=())
        for record in records
    ]
    return DoorResult(
        door,
        level_of(times, rate, plan.deadline_s, records),
        level_of(times, rate, plan.deadline_s, inside).goodput,
    )


async def measure(
    cluster: Cluster, client: AsyncClient, plan: Plan, num_places: int
) -> tuple[float, list[DoorResult]]:
    """The capacity in answers/s, and both doors' results. num_places: of the decode worker."""
    model = await client.model()

    def requests_at(rate: float, seed: int) -> tuple[LoadRequest, ...]:
        number_of = max(2, round(rate * plan.for_s))
        load = dataclasses.replace(_LOAD, num_requests=number_of, seed=seed)
        entries = entries_of(load, model.max_model_len)
        return load_of(load, entries, Run("", rate, 0), model.vocab_size)[0]

    capacity = await capacity_of(client, requests_at(64 / plan.for_s, 0), 2 * num_places)
    results: list[DoorResult] = []
    for times, door in itertools.product(plan.times, ("gRPC", "HTTP")):
        rate = times * capacity
        requests, salt = requests_at(rate, len(results)), secrets.token_hex(8)
        gc.collect()
        gc.freeze()  # a collection would pause this process, and delay refusals
        using = asyncio.create_task(_cores_used(cluster, plan.for_s))
        if door == "gRPC":
            options = DriveOptions(cache_salt=salt, timeout_s=plan.deadline_s)
            records = await drive(client, requests, options)
        else:
            address = cluster.http_address
            records = await drive_http(address, requests, salt, deadline_s=plan.deadline_s)
        result = result_of(door, plan, times, rate, records)
        results.append(dataclasses.replace(result, cores=await using))
        typer.echo(f"{results[-1]}", err=True)
    return capacity, results


async def _cores_used(cluster: Cluster, for_s: float) -> tuple[float, float, float]:
    """Cores that gateway, workers and this process use in the mean of the next seconds."""
    pids = {name: cluster.pid_of(name) for name in cluster.names}
    of_gateway = [pid for name, pid in pids.items() if name == "gateway"]
    of_workers = [pid for name, pid in pids.items() if name != "gateway"]
    groups = (of_gateway, of_workers, [os.getpid()])
    before_s = [sum(map(cpu_seconds, group)) for group in groups]
    await asyncio.sleep(for_s)
    used = [sum(map(cpu_seconds, each)) - s for each, s in zip(groups, before_s, strict=True)]
    return used[0] / for_s, used[1] / for_s, used[2] / for_s


def markdown(
    conditions: str, plan: Plan, capacity: float, results: Sequence[DoorResult], options: str
) -> str:
    """The table, and whether the goal is met. conditions: of the machine. options: of the
    cluster."""
    slo = plan.slo
    what = (
        f"Capacity {number(capacity)} answers/s with {options}; deadlines of {plan.deadline_s:g} "
        f"s, {plan.for_s:g} s a load; inside: first token within {slo.ttft_ms:g} ms, then "
        f"{slo.tpot_ms:g} ms a token."
    )
    goal = Goal("refusals' p99, ms", MAX_REFUSAL_MS, is_at_most=True)
    shown = {
        f"{result.door} at {result.level.times:g} times": result.level.refusal_p99_ms
        for result in results
    }
    rows = table(HEADINGS, [result.row() for result in results])
    return "\n".join([f"{conditions} {what}", "", rows, "", goal_line(goal, shown)])


def main(
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Option of `baton serve`."),
    ] = None,
    times: Annotated[
        list[float] | None, typer.Option(min=1, help="Of the capacity; 5 and 10 if not given.")
    ] = None,
    for_s: Annotated[float, typer.Option(help="How long each load lasts.")] = 20.0,
    deadline_s: Annotated[float, typer.Option(help="Of each request.")] = 5.0,
    ttft_ms: Annotated[float, typer.Option(min=1)] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(min=1)] = 60.0,
    write: Annotated[Path | None, typer.Option(help="Page with a part for the table.")] = None,
) -> None:
    """Measure the time to a refusal."""
    if for_s <= deadline_s:
        raise typer.BadParameter("--for-s: give more than --deadline-s, for what is counted later")
    started_at = now()
    plan = Plan(tuple(times or (5.0, 10.0)), for_s, deadline_s, Slo(ttft_ms, tpot_ms))
    settings = {
        "engine": "oracle",
        "oracle_step_ms": _STEP_MS,
        "max_num_seqs": _NUM_PLACES,
        "num_gpu_blocks_override": 2000,
        "slo_ttft_ms": ttft_ms,
        "slo_tpot_ms": tpot_ms,
        **settings_of(set_ or ()),
    }

    async def run(options: ServeOptions) -> tuple[float, list[DoorResult]]:
        async with (
            Cluster(options) as cluster,
            AsyncClient(cluster.address, max_retries=0) as client,
        ):
            return await measure(cluster, client, plan, options.max_num_seqs)

    try:
        (options,) = cluster_options(BUNDLED_MODEL, settings, compares=False).values()
        capacity, results = asyncio.run(run(options))
    except ChildFailed as error:
        raise SystemExit("\n".join((*error.last_lines, f"refusals: {error}"))) from None
    except (BatonError, OSError) as error:
        raise SystemExit(f"refusals: {error}") from None
    shown = f"{options.max_num_seqs} places and steps of {options.oracle_step_ms:g} ms"
    conditions = about(document_of("bench.refusals", started_at, {}))
    body = markdown(conditions, plan, capacity, results, shown)
    typer.echo(body)
    if write:
        write_part(write, PART, body)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m bench.refusals")
