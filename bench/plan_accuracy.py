"""What `baton plan --gpu cpu` predicts, beside what the engine takes: steps and prompts, by one
rank and by two.

    python -m bench.plan_accuracy [--model NAME ...] [--ranks N ...] [--rounds 3] [--threads N]
        [--cpu-time] [--json FILE] [--write]

The device is measured before each round of the same run (engine.plan.host). Both sides are the best
of all rounds, which others on the machine disturb least. Where they disturb too much, --cpu-time
compares the CPU time of rank 0, each rank having one thread: what it waits for others does not
count. --write: renews the table of docs/planning.md.
Models: see bench/peers/models.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baton.config.load import build_options
from baton.config.plan_options import PlanOptions
from bench.machine import ROOT, document_of, now, publish
from bench.peers.models import NAMES, checkpoint
from bench.peers.ours import BatonContender
from bench.peers.processes import ask_all, command_of
from bench.peers.task import Answer, Task
from bench.suite.markdown import about, number, replaced, table
from engine.plan.devices import Device
from engine.plan.host import CpuProbe, share_of
from engine.plan.model import ModelSizes
from engine.plan.roofline import prompt_s, step_s
from engine.plan.source import read_model
from engine.ranks.mesh import Degrees

_TOKENS = 16
#: The largest first: see BatonContender.
_TASKS = {
    "tiny": (Task(3, 20, 6), Task(1, 10, 6)),
    "box": (Task(8, 512, _TOKENS), Task(1, 512, _TOKENS)),
    "125m": (Task(8, 128, _TOKENS), Task(1, 512, _TOKENS)),
}
_CHUNK = 8192
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

    peaks = [device.flops_per_s for device in devices]
    return replace(
        devices[0],
        read_bytes_per_s=rate("read_bytes_per_s"),
        link_bytes_per_s=rate("link_bytes_per_s"),
        few_rows_share=rate("few_rows_share"),
        flops_per_s={dtype: max(peak[dtype] for peak in peaks) for dtype in peaks[0]},
    )


def rows_of(
    name: str,
    sizes: ModelSizes,
    devices: Callable[[int], Device],
    answers: Mapping[int, Mapping[Task, Sequence[Answer]]],
) -> Iterator[Row]:
    """Rows of one model. devices: what each rank has, by number of ranks, as are the answers."""
    for num_ranks, by_task in answers.items():
        degrees, own = Degrees(num_ranks), devices(num_ranks)
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


def measure_cpu_time(name: str, ranks: Sequence[int], num_rounds: int) -> list[Row]:
    """Run one model by each number of ranks, rank 0 here, with one thread each, in CPU time."""
    folder = checkpoint(name, "bfloat16")
    sizes, weight_bytes = sizes_of(folder)
    dtype, clock = sizes.storage.dtype, time.process_time
    torch.set_num_threads(1)
    probe, devices = CpuProbe(weight_bytes, dtype, clock), list[Device]()
    answers: dict[int, dict[Task, list[Answer]]] = {}
    for num_ranks in ranks:
        engine = BatonContender(str(folder), dtype, num_ranks, clock)
        answers[num_ranks] = {task: [] for task in _TASKS[name]}
        for task, found in answers[num_ranks].items():
            engine.run(task)
            for _ in range(num_rounds):
                devices.append(probe.measure())
                found.append(engine.run(task))
    device = best_of(devices)
    return list(rows_of(name, sizes, lambda _: device, answers))


def measure(name: str, ranks: Sequence[int], num_rounds: int, num_threads: int) -> list[Row]:
    """Run one model by each number of ranks, by turns."""
    sizes, weight_bytes = sizes_of(checkpoint(name, "bfloat16"))
    dtype = sizes.storage.dtype
    commands = {str(n): [*command_of("baton", name, dtype, num_threads), str(n)] for n in ranks}
    probe, devices = CpuProbe(weight_bytes, dtype), list[Device]()
    asked = ask_all(
        commands,
        _TASKS[name],
        num_rounds,
        lambda: devices.append(probe.measure()),
    )
    for failed, reason in asked.failures.items():
        raise SystemExit(f"{name} by {failed} ranks: {reason}")
    answers = {int(n): by_task for n, by_task in asked.answers.items()}
    return list(rows_of(name, sizes, partial(share_of, best_of(devices)), answers))


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
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    started = now()
    torch.set_num_threads(given.threads)
    rows = [
        row
        for model in given.model
        for row in (
            measure_cpu_time(model, given.ranks, given.rounds)
            if given.cpu_time
            else measure(model, given.ranks, given.rounds, given.threads)
        )
    ]
    data = {"num_threads": given.threads, "rows": [dataclasses.asdict(row) for row in rows]}
    document = document_of("bench.plan_accuracy", started, data)
    publish(document, given.json, accuracy_table)
    if given.write:
        PAGE.write_text(replaced(PAGE.read_text(), "plan-accuracy", accuracy_table(document)))


if __name__ == "__main__":
    main()
