"""The engine at every CPU level of this machine, on one thread and in CPU time, so that others may
use the machine meanwhile.

    python -m bench.levels [--level NAME ...]

A decode step of one sequence of the 125m shape after 256 tokens, and its prompt, beside the level's
roofs (of reading, and of products: see bench.roof) and beside transformers, whose torch is held to
the same level. The best of some.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from baton.model.config import read_config
from baton_kernels.cpu.library import levels_of_machine
from bench.cpu_level import level_environment
from bench.engine import floor_s, prompt_floor_s
from bench.peers.models import checkpoint
from bench.peers.ours import BatonContender
from bench.peers.task import Task
from bench.peers.transformers_peers import GenerateContender
from bench.roof import Roof, measure_roof

_ROOT = Path(__file__).resolve().parents[1]
_TASK = Task(1, 256, 16)
_ROUNDS = 2


def _run_level(level: str) -> None:
    """Rows of the table. In a process of its own, which runs at that level."""
    torch.set_num_threads(1)
    # All that is timed here runs in this thread.
    time.perf_counter = time.monotonic = time.thread_time
    folder = checkpoint("125m", "bfloat16")
    config = read_config(folder)
    roofs = [measure_roof(3)]
    for name, dtype in (("Baton", "bfloat16"), ("torch", "float32"), ("torch", "bfloat16")):
        kind = BatonContender if name == "Baton" else GenerateContender
        contender = kind(str(folder), dtype)
        answers = [contender.run(_TASK) for _ in range(_ROUNDS)]
        step_s = min(min(answer.steps_s) for answer in answers)
        prompt_s = min(answer.prefill_s for answer in answers)
        roofs.append(measure_roof(3))
        cells = [level, f"{name} {dtype}", f"{step_s * 1e3:.1f}", "", f"{prompt_s * 1e3:.0f}", ""]
        if name == "Baton":
            roof = Roof(
                max(roof.read_bytes_per_s for roof in roofs),
                max(roof.flops_per_s for roof in roofs),
            )
            context = _TASK.context + _TASK.num_tokens // 2
            cells[3] = f"{floor_s(config, dtype, 1, context, roof) / step_s:.2f}"
            cells[5] = f"{prompt_floor_s(config, _TASK.context, roof) / prompt_s:.2f}"
            speeds = f"{roof.read_bytes_per_s / 1e9:.0f} GB/s, {roof.flops_per_s / 1e9:.0f} GFLOP/s"
            cells[0] = f"{level} ({speeds})"
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()


def main() -> None:
    """Measure and tell."""
    levels = levels_of_machine()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--level", nargs="+", choices=levels, default=levels)
    parser.add_argument("--within", choices=levels, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.within:
        _run_level(given.within)
        return
    sys.stdout.write("| Level | | Step, ms | Floor / step | Prompt, ms | Floor / prompt |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    sys.stdout.flush()
    for level in given.level:
        command = [sys.executable, "-m", "bench.levels", "--within", level]
        subprocess.run(command, cwd=_ROOT, env=level_environment(level), check=True)


if __name__ == "__main__":
    main()
