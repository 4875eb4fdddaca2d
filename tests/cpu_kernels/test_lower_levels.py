"""What the default run shows at the machine's best level, shown at each lower one: a few cases that
go through everything.

The kernels by themselves are test_program.py's; all of the suite runs at a level with
BATON_CPU_LEVEL=... make test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton_kernels.cpu.library import LEVEL_VARIABLE, chosen_level, levels_of_machine

ROOT = Path(__file__).parents[2]
#: Bits of chunks, batches and block sizes; layers in one call; pools of every type; ranks;
#: launching ahead.
CASES = (
    "tests/cpu_kernels/test_engine_bits.py",
    "tests/cpu_kernels/test_native_decoder.py::test_same_bits_with_weights_of_integers",
    "tests/cpu_kernels/test_native_decoder.py::test_same_bits_over_a_pool_of_another_type",
    "tests/tensor_parallel/test_engine.py",
    "tests/model/test_launched_ahead.py",
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("level", levels_of_machine()[1:])
def test_core_cases(level: str) -> None:
    if chosen_level() not in levels_of_machine()[:1]:
        pytest.skip("this run is at another level than the best")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *CASES,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {LEVEL_VARIABLE: level},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
