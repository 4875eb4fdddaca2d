"""Runs a comparison: from models, contenders and tasks to figures, and the roof of the same run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from bench.peers.figures import Figure, figure_of
from bench.peers.models import NAMES, PeerMissing
from bench.peers.processes import CHUNKS, Asked, ContenderFailed, ask_all, command_of
from bench.peers.task import Task
from bench.roof import Roof, measure_roof

#: The contender that others' tokens are compared with.
REFERENCE = "transformers"


@dataclass(frozen=True, slots=True)
class Case:
    """Contenders that run the same tasks on one model, by turns."""

    model: str
    dtype: str
    contenders: tuple[str, ...]
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """A contender without figures, and why."""

    model: str
    dtype: str
    contender: str
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """One case. roof: medians of measurements before each round."""

    figures: tuple[Figure, ...]
    missing: tuple[Missing, ...]
    roof: Roof


def run_case(case: Case, num_rounds: int, num_threads: int, *, tunes: bool = False) -> Result:
    """Contenders that cannot run are shown as missing. All others end with it. tunes: run those of
    CHUNKS with the fastest chunk, else with the first."""
    commands, missing, chunks = {}, [], dict[str, int]()
    for contender in case.contenders:
        command = partial(command_of, contender, case.model, case.dtype, num_threads)
        try:
            if sizes := CHUNKS.get(contender, ()):
                ways = {size: command(size) for size in sizes}
                chunks[contender] = _fastest(ways, case.tasks) if tunes else sizes[0]
            commands[contender] = command(chunks.get(contender, 0))
        except (PeerMissing, ContenderFailed) as error:
            missing.append(Missing(case.model, case.dtype, contender, str(error)))
    torch.set_num_threads(num_threads)
    roofs: list[Roof] = []
    asked = ask_all(commands, case.tasks, num_rounds, lambda: roofs.append(measure_roof(2)))
    missing += [
        Missing(case.model, case.dtype, name, reason) for name, reason in asked.failures.items()
    ]
    roof = Roof(
        median(roof.read_bytes_per_s for roof in roofs),
        median(roof.flops_per_s for roof in roofs),
    )
    return Result(tuple(_figures(case, asked, chunks)), tuple(missing), roof)


def _fastest(commands: Mapping[int, Sequence[str]], tasks: Sequence[Task]) -> int:
    """The chunk that takes the least time for one round of all tasks, of those that can run. Raises
    ContenderFailed if none can."""
    seconds: dict[int, float] = {}
    for chunk, command in commands.items():
        asked = ask_all({"": command}, tasks, 1)
        if not asked.failures:
            answers = (answer for of_task in asked.answers[""].values() for answer in of_task)
            seconds[chunk] = sum(answer.prefill_s + sum(answer.steps_s) for answer in answers)
    if not seconds:
        raise ContenderFailed(asked.failures[""])
    return min(seconds, key=seconds.__getitem__)


def _figures(case: Case, asked: Asked, chunks: Mapping[str, int]) -> Iterator[Figure]:
    for task in case.tasks:
        references = asked.answers.get(REFERENCE, {}).get(task, ())
        reference = references[-1] if references else None
        for name, by_task in asked.answers.items():
            if by_task[task]:
                yield figure_of(
                    *(case.model, case.dtype, name, task, by_task[task], reference),
                    chunk=chunks.get(name, 0),
                )


def parser_of(
    doc: str | None, models: Sequence[str], dtypes: Sequence[str]
) -> argparse.ArgumentParser:
    """Options of a program that runs cases: models, types, rounds, threads, and where the result
    goes. doc: the program's own. models: by default."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--model", nargs="+", choices=NAMES, default=models)
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    return parser


def run_cases(cases: Mapping[Case, int], num_threads: int, *, tunes: bool = False) -> list[Result]:
    """Each case in so many rounds. This process and all that it starts run on the first of the
    cores that it may use, one for each thread. tunes: see run_case."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_threads])
    results = []
    for case, num_rounds in cases.items():
        results.append(run_case(case, num_rounds, num_threads, tunes=tunes))
        _show(case, results[-1])
    return results


def _show(case: Case, result: Result) -> None:
    """On stderr, a line for each figure and for each contender without one."""
    for figure in result.figures:
        times = f"prompt {figure.prompt_ms:.1f} ms, step {figure.step_ms:.2f} ms"
        what = f"{figure.batch} x {figure.context}"
        sys.stderr.write(f"{case.model} {case.dtype} {what} {figure.contender}: {times}\n")
    for one in result.missing:
        sys.stderr.write(f"{case.model} {case.dtype} {one.contender}: {one.reason}\n")
    sys.stderr.flush()


def data_of(results: Sequence[Result]) -> dict[str, object]:
    """As plain values. The roof is one for each figure's model and type."""
    return {
        "figures": [dataclasses.asdict(f) for result in results for f in result.figures],
        "missing": [dataclasses.asdict(m) for result in results for m in result.missing],
        "roofs": [
            {"model": f.model, "dtype": f.dtype, **dataclasses.asdict(result.roof)}
            for result in results
            for f in result.figures[:1]
        ],
    }
