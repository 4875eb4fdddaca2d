"""Kernels that were compiled once need not be compiled again where their cache is copied to the
same place, elsewhere: so an image may carry them. No GPU is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

#: Compiles one kernel for sm_90, and prints how often the compiler ran.
_COMPILE = """
import torch
from triton.compiler import compiler
from bench.gpu.case import TINY
from bench.gpu.cases import all_cases
from bench.gpu.compile import compile_case

runs = []
make_ir = compiler.ASTSource.make_ir
compiler.ASTSource.make_ir = lambda *args, **kwargs: runs.append(1) or make_ir(*args, **kwargs)
(case,) = (case for case in all_cases() if case.name == "rms_norm")
compile_case(case.build(torch.Generator().manual_seed(0), TINY).run, 90)
print(len(runs))
"""


def compiled(cache: Path) -> int:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_a_copy_of_a_cache_is_found_in_the_place_of_the_first(tmp_path: Path) -> None:
    cache, carried = tmp_path / "cache", tmp_path / "carried"
    assert compiled(cache) == 1
    shutil.copytree(cache, carried)
    shutil.rmtree(cache)
    shutil.copytree(carried, cache)
    assert compiled(cache) == 0
