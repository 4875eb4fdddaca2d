"""Baton's engine beside llama.cpp on one GGUF file, by turns: `python -m bench.gguf FILE [--rounds
N] [--threads N]`.

Baton runs twice, so that the table shows the noise of the machine. Times are medians over all
rounds; ratios are of one round's times each, and their median. bench/peers/setup.sh builds
llama.cpp.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from statistics import median

import torch

from bench.peers.models import peers_python
from bench.peers.processes import ContenderProcess, contender_process
from bench.peers.task import Answer, Task

_TASKS = (Task(1, 256, 16), Task(8, 64, 16))
_CONTENDERS = ("baton", "baton again", "llama.cpp")


def command_of(contender: str, path: str, threads: int) -> list[str]:
    """Command of a contender's process."""
    if contender == "llama.cpp":
        return [str(peers_python()), "-m", "bench.peers.llama_cpp", path, str(threads)]
    arguments = ("baton", path, "bfloat16", str(threads))
    return [sys.executable, "-m", "bench.peers.contender", *arguments]


def measure(
    processes: dict[str, ContenderProcess], task: Task, num_rounds: int
) -> dict[str, list[Answer]]:
    """Answers of each round, without a first one that warms up; each begins with another
    contender."""
    names, answers = list(processes), {name: list[Answer]() for name in processes}
    for turn in range(num_rounds + 1):
        for name in names:
            answer = processes[name].ask(task)
            answers[name] += [answer] if turn else []
        names.append(names.pop(0))
    return answers


def rows(task: Task, answers: dict[str, list[Answer]]) -> list[str]:
    """A row for prompts, and one for steps."""
    times = {
        "prompt": {name: [each.prefill_s for each in own] for name, own in answers.items()},
        "step": {name: [median(each.steps_s) for each in own] for name, own in answers.items()},
    }
    made = []
    for what, by_name in times.items():
        shown = " | ".join(f"{median(by_name[name]) * 1e3:.1f}" for name in _CONTENDERS)
        ratios = (
            median(a / b for a, b in zip(by_name[other], by_name["baton"], strict=True))
            for other in _CONTENDERS[1:]
        )
        of_peers = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        made.append(f"| {what}, {task.batch} x {task.context} | {shown} | {of_peers} |")
    return made


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                contender_process(command_of(name, given.file, given.threads))
            )
            for name in _CONTENDERS
        }
        sys.stdout.write(
            "| | Baton, ms | Baton again | llama.cpp | Baton again / Baton | llama.cpp / Baton |\n"
            "|---|---|---|---|---|---|\n"
        )
        for task in _TASKS:
            for row in rows(task, measure(processes, task, given.rounds)):
                sys.stdout.write(f"{row}\n")


if __name__ == "__main__":
    main()
