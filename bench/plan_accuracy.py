"""What `baton plan --gpu cpu` predicts, beside what the engine takes: steps and prompts, by one
rank and by two.

    python -m bench.plan_accuracy [--model NAME ...] [--ranks N ...] [--rounds 3] [--threads N]
        [--cpu-time] [--json FILE] [--write]

The device and the costs of the host are measured before each run of a task, in this process
(engine.plan.host, engine.plan.host_costs). Both sides are the best of a task's rounds, which others
on the machine disturb least. Where they disturb too much, --cpu-time compares the CPU time of
rank 0: what it waits for others does not count. --threads: of each rank. --write: renews the table
of docs/planning.md.
Models: see bench/peers/models.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from baton.config.load import build_options
from baton.config.plan_options import PlanOptions
from bench.machine import ROOT, document_of, now, publish
from bench.peers.models import NAMES, checkpoint
from bench.peers.ours import BatonContender
from bench.peers.task import Answer, Task
from bench.suite.markdown import about, number, replaced, table
from engine.plan.devices import Device, HostCosts
from engine.plan.host import CpuProbe, Heads, share_of
from engine.plan.host_costs import host_costs, host_probe
from engine.plan.model import ModelSizes
from engine.plan.roofline import prompt_s, step_s
from engine.plan.source import read_model
from engine.ranks.mesh import Degrees

#: Of each answer, and as many times is the device measured: the best of few is worse.
_TOKENS = 16
#: The largest first: see BatonContender.
_TASKS = {
    "tiny": (Task(3, 20, 6), Task(1, 10, 6)),
    "box": (Task(8, 512, _TOKENS), Task(1, 512, _TOKENS)),
    "125m": (Task(8, 128, _TOKENS), Task(1, 512, _TOKENS)),
}
_CHUNK = 8192
#: Seconds.
Clock = Callable[[], float]
PAGE = ROOT / "docs" / "planning.md"
#: The deviation that a plan should keep.
BOUND = 0.15


@dataclass(frozen=True, slots=True)
class Row:
    """One time, in milliseconds. what: "step" or "prompt"."""

    model: str
    num_ranks: int
    what: str
    batch: int
    context: int
    predicted_ms: float
    measured_ms: float

    @property
    def deviation(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1


def best_of(devices: Sequence[Device]) -> Device:
    """One device with the best rates of several measurements."""

    def rate(name: str) -> float:
        return max(float(getattr(device, name)) for device in devices)

    kinds = zip(*(device.attention_flops_per_s or () for device in devices), strict=True)
    attention = tuple(max(rates) for rates in kinds) or None
    peaks = [device.flops_per_s for device in devices]
    return replace(
        devices[0],
        read_bytes_per_s=rate("read_bytes_per_s"),
        link_bytes_per_s=rate("link_bytes_per_s"),
        few_rows_share=rate("few_rows_share"),
        attention_flops_per_s=attention,
        flops_per_s={dtype: max(peak[dtype] for peak in peaks) for dtype in peaks[0]},
    )


def least_of(costs: Sequence[HostCosts]) -> HostCosts:
    """The least costs of several measurements."""
    return HostCosts(*(min(each) for each in zip(*map(astuple, costs), strict=True)))


def rows_of(
    name: str,
    sizes: ModelSizes,
    devices: Mapping[int, Device],
    answers: Mapping[int, Mapping[Task, Sequence[Answer]]],
) -> Iterator[Row]:
    """Rows of one model. devices: what each rank has, by number of ranks, as are the answers."""
    for num_ranks, by_task in answers.items():
        degrees, own = Degrees(num_ranks), devices[num_ranks]
        for task, found in by_task.items():
            # A sequence grows while it is timed: on average by half of its new tokens.
            context = task.context + task.num_tokens // 2
            times = {
                "step": (
                    step_s(sizes, degrees, own, task.batch, context),
                    min(step for answer in found for step in answer.steps_s),
                ),
                "prompt": (
                    prompt_s(sizes, degrees, own, task.context, _CHUNK),
                    min(answer.prefill_s for answer in found) / task.batch,
                ),
            }
            for what, (predicted, measured) in times.items():
                yield Row(
                    *(name, num_ranks, what, task.batch, task.context),
                    *(predicted * 1e3, measured * 1e3),
                )


def sizes_of(folder: Path) -> tuple[ModelSizes, int]:
    """Sizes of a checkpoint in the type that the CPU computes in, and bytes of its layers."""
    options = build_options(PlanOptions, {"model": str(folder), "gpu": "cpu"})
    sizes = read_model(options, "cpu", has_float8=False).sizes
    return sizes, round(sum(sizes.storage.read_bytes(layer.total) for layer in sizes.layers))


def measure(
    name: str, ranks: Sequence[int], num_rounds: int, num_threads: int, clock: Clock
) -> list[Row]:
    """Run one model by each number of ranks, by turns with the probes. num_threads: of a rank."""
    folder = checkpoint(name, "bfloat16")
    sizes, weight_bytes = sizes_of(folder)
    dtype, longest = sizes.storage.dtype, _TASKS[name][0]
    probe = CpuProbe(weight_bytes, dtype, Heads.of(sizes), clock)
    rows: list[Row] = []
    with ExitStack() as stack:
        probes = {n: stack.enter_context(host_probe(n, dtype, clock)) for n in {1, *ranks}}
        engines: dict[int, BatonContender] = {}
        for num_ranks in ranks:
            torch.set_num_threads(num_threads * num_ranks)
            engines[num_ranks] = BatonContender(str(folder), dtype, num_ranks, clock)
            stack.callback(engines[num_ranks].close)
            engines[num_ranks].run(longest)
        for task in _TASKS[name]:
            devices: dict[int, list[Device]] = {num_ranks: [] for num_ranks in ranks}
            hosts: dict[int, list[HostCosts]] = {num_ranks: [] for num_ranks in probes}
            answers: dict[int, list[Answer]] = {num_ranks: [] for num_ranks in ranks}
            for num_ranks in [*ranks] * num_rounds:
                # In CPU time a rank has its threads for itself.
                size = 1 if clock is time.process_time else num_ranks
                torch.set_num_threads(num_threads * size)
                devices[num_ranks].append(share_of(probe.measure(_TOKENS), size))
                torch.set_num_threads(num_threads)
                for size in {1, num_ranks}:
                    hosts[size].append(probes[size].measure())
                answers[num_ranks].append(engines[num_ranks].run(task))
            costs = host_costs({n: least_of(found) for n, found in hosts.items()})
            best = {n: replace(best_of(found), hosts=costs) for n, found in devices.items()}
            by_task = {n: {task: found} for n, found in answers.items()}
            rows += rows_of(name, sizes, best, by_task)
    return rows


def accuracy_table(document: Mapping[str, Any]) -> str:
    """Markdown: a line for each time, and how many keep the bound."""
    rows = [Row(**row) for row in document["rows"]]
    kept = sum(abs(row.deviation) <= BOUND for row in rows)
    lines = [
        [
            *(row.model, str(row.num_ranks), row.what, str(row.batch), str(row.context)),
            *(number(row.predicted_ms), number(row.measured_ms), f"{row.deviation:+.0%}"),
        ]
        for row in rows
    ]
    headings = ("Model", "Ranks", "", "B", "Context", "Predicted, ms", "Measured, ms", "Deviation")
    summary = f"Within {BOUND:.0%}: {kept} of {len(rows)}."
    return "\n\n".join([about(document), table(headings, lines), summary])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [name for name in NAMES if name in _TASKS]
    parser.add_argument("--model", nargs="+", choices=names, default=["box", "125m"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    started = now()
    clock = time.process_time if given.cpu_time else time.perf_counter
    rows = [
        row
        for model in given.model
        for row in measure(model, given.ranks, given.rounds, given.threads, clock)
    ]
    data = {"num_threads": given.threads, "rows": [dataclasses.asdict(row) for row in rows]}
    document = document_of("bench.plan_accuracy", started, data)
    publish(document, given.json, accuracy_table)
    if given.write:
        PAGE.write_text(replaced(PAGE.read_text(), "plan-accuracy", accuracy_table(document)))


if __name__ == "__main__":
    main()
