"""Days of a fleet: one wave of load, in which workers are lost and come back."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import pi, sin
from os import cpu_count
from pathlib import Path

from baton.types import Slo
from bench.fleet.contenders import planned
from bench.fleet.failures import Failure, GatewaysLost, RegistryAway, WorkersLost
from bench.fleet.runs import Figures, Run, capacity, figures_of, load_of
from bench.fleet.worker import Hardware
from bench.suite.markdown import Goal, goal_line, number, table
from engine.plan.trace import TraceEntry, read_trace

#: Depth of the wave: the rate goes from 0.2 to 1.8 times its mean.
_DEPTH = 0.8


@dataclass(frozen=True, slots=True)
class Day:
    """num_requests: None: those of `factor`, the mean load relative to runs.capacity."""

    name: str
    num_workers: int
    seconds: float
    num_gateways: int
    factor: float = 0.0
    num_requests: int | None = None

    @property
    def failures(self) -> tuple[Failure, ...]:
        """In the morning a rack (one worker of 16), at noon a zone (one of 3), then half of the
        gateways, then the registry, and while it is away another rack and half of the gateways."""
        day_s, down_s = self.seconds, self.seconds / 48
        return (
            WorkersLost(day_s * 6 / 16, down_s, one_of=16),
            WorkersLost(day_s * 8 / 16, down_s, one_of=3, first=1),
            GatewaysLost(day_s * 9 / 16, down_s),
            RegistryAway(day_s * 10 / 16, 3 * down_s),
            WorkersLost(day_s * 10.5 / 16, down_s, one_of=16, first=1),
            GatewaysLost(day_s * 11 / 16, down_s),
        )


#: The large fleet is idle most of the time; still it takes a core ten minutes.
DAYS = (
    Day("large", 1000, 86_400.0, 2, num_requests=20_000),
    Day("busy", 16, 600.0, 4, factor=0.4),
)
HEADINGS = (
    *(
        "trace",
        "gateways",
        "workers",
        "hours",
        "requests",
        "goodput, requests/s",
        "inside",
        "worker-hours",
    ),
    *("hits", "GB handed over", "role changes", "refused", "begun anew", "not finished", "wrong"),
    "s of a core",
)


def in_a_wave(entries: Sequence[TraceEntry], seconds: float) -> list[TraceEntry]:
    """The same requests, fewest at the start and the end and most in the middle."""

    def at(share: float) -> float:
        """When this share of the requests has come."""
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            come = middle - _DEPTH / (2 * pi) * sin(2 * pi * middle)
            low, high = (middle, high) if come < share else (low, middle)
        return low

    return [
        replace(entry, arrival_s=seconds * at(min(1.0, entry.arrival_s / seconds)))
        for entry in entries
    ]


def run_of(day: Day, trace: Sequence[TraceEntry], hardware: Hardware, slo: Slo) -> Run:
    """The planner's run of a day."""
    if day.num_requests:
        rate = day.num_requests / day.seconds
    else:
        rate = day.factor * capacity(trace[:4000], hardware, day.num_workers, slo)
    entries = in_a_wave(load_of(trace, rate, day.seconds, 0), day.seconds)
    shape = planned(hardware, day.num_workers, slo)
    return Run(shape, hardware, slo, entries, failures=day.failures, num_gateways=day.num_gateways)


def markdown(paths: Sequence[Path], hardware: Hardware, slo: Slo, command: str) -> str:
    """Run all days on all traces; the table, and whether the goals are met."""
    names = [(path.stem, day) for path in paths for day in DAYS]
    runs = [run_of(day, trace, hardware, slo) for trace in map(read_trace, paths) for day in DAYS]
    with ProcessPoolExecutor(cpu_count()) as pool:
        figures = list(pool.map(figures_of, runs))
    rows = [_row(name, day, each) for (name, day), each in zip(names, figures, strict=True)]
    wrong = {
        f"{name}, {day.name}": float(each.num_broken + each.num_wrong)
        for (name, day), each in zip(names, figures, strict=True)
    }
    goal = Goal("requests that were begun and not finished, or not with each token once", 0, True)
    about = (
        f"By `{command}`, simulated: the planner; the rate goes from {1 - _DEPTH:.1f} to "
        f"{1 + _DEPTH:.1f} times its mean. Lost for 1/48 of the time each: a rack (one worker of "
        "16), a zone (one of 3), half of the gateways, and, while the registry is away for 1/16 of "
        f"the time, another rack and half of the gateways. Inside: first token within "
        f"{slo.ttft_s:g} s, then {1e3 * (slo.tpot_s or 0):g} ms a token.\n"
    )
    return "\n".join([about, table(HEADINGS, rows), "", goal_line(goal, wrong)])


def _row(trace: str, day: Day, figures: Figures) -> list[str]:
    return [
        trace,
        f"{day.num_gateways}",
        f"{day.num_workers:,}",
        number(day.seconds / 3600),
        f"{figures.num_requests:,}",
        number(figures.goodput),
        f"{figures.attainment:.1%}",
        number(figures.worker_hours),
        f"{figures.hit_share:.0%}",
        number(figures.sent_bytes / 1e9),
        f"{figures.num_changes}",
        f"{figures.refused:.1%}",
        f"{figures.num_restarts}",
        f"{figures.num_broken}",
        f"{figures.num_wrong}",
        number(figures.cpu_s),
    ]
