"""The engine at each CPU level of this machine, beside llama.cpp and torch at the same level.

    python -m bench.levels [--level NAME ...] [--model NAME ...] [--dtype NAME ...]
        [--contender NAME ...] [--rounds 5] [--threads N] [--json FILE]

Each level runs in its own process, with BATON_CPU_LEVEL set: the roofs of reads and products before
each round, then its contenders in turns, on the same cores. torch is transformers' `generate`,
limited to the level's instructions; llama.cpp is a build for the level: see bench/peers/setup.sh.
Times are wall-clock medians over all steps of all rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

from baton_kernels.cpu.library import levels_of_machine
from bench.engine import floors_data
from bench.machine import document_of, level_environment, now, publish
from bench.peers.comparison import Case, data_of, parser_of, run_cases
from bench.peers.models import peer_versions
from bench.peers.task import Task
from bench.suite.engine_tables import levels_table

_ROOT = Path(__file__).resolve().parents[1]
_TOKENS = 16
_TASKS = {
    "tiny": (Task(1, 20, 6),),
    "box": (Task(1, 500, _TOKENS),),
    "125m": (Task(1, 256, _TOKENS), Task(8, 128, _TOKENS)),
}
_CONTENDERS = {
    "bfloat16": ("baton", "llama.cpp", "transformers"),
    "float32": ("baton", "transformers"),
    "int8": ("baton", "llama.cpp"),
}


def measure_level(given: argparse.Namespace) -> dict[str, object]:
    """Measure the level of this process: figures, their floors, roofs, and missing contenders."""
    cases = {}
    for model, dtype in itertools.product(given.model, given.dtype):
        contenders = tuple(name for name in _CONTENDERS[dtype] if name in given.contender)
        cases[Case(model, dtype, contenders, _TASKS[model])] = given.rounds
    results = run_cases(cases, given.threads)
    return {**data_of(results), **floors_data(results)}


def _in_process(level: str, given: argparse.Namespace) -> dict[str, object]:
    """Run `measure_level` at `level` in another process. Raises CalledProcessError."""
    options = [
        *("--within", level, "--model", *given.model, "--dtype", *given.dtype),
        *("--contender", *given.contender),
        *("--rounds", str(given.rounds), "--threads", str(given.threads)),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bench.levels", *options],
        cwd=_ROOT,
        env=level_environment(level),
        check=True,
        stdout=subprocess.PIPE,
    )
    return {"level": level, **json.loads(done.stdout)}


def main() -> None:
    """Measure and print."""
    levels = levels_of_machine()
    parser = parser_of(__doc__, ("box", "125m"), tuple(_CONTENDERS))
    parser.add_argument("--level", nargs="+", choices=levels, default=levels)
    names = _CONTENDERS["bfloat16"]
    parser.add_argument("--contender", nargs="+", choices=names, default=names)
    parser.add_argument("--within", choices=levels, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.within:
        json.dump(measure_level(given), sys.stdout)
        return
    started = now()
    measured = [_in_process(level, given) for level in given.level]
    document = document_of(
        "bench.levels", started, {"num_threads": given.threads, "levels": measured}
    )
    document["versions"] |= peer_versions()
    publish(document, given.json, levels_table)


if __name__ == "__main__":
    main()
