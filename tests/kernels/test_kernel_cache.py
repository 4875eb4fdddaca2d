"""Kernels that were compiled once need not be compiled again where their cache is copied to the
same place, elsewhere: so an image may carry them. No GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

#: Compiles one kernel for sm_90 three times: into a cache, with a copy of it elsewhere, and with a
#: copy in the place of the first. Prints how often the compiler ran. Each is a fork of its own, so
#: that only files are left for the next.
_COMPILE = """
import multiprocessing
import os
import shutil
import sys

import torch
from triton.compiler import compiler
from bench.gpu.case import TINY
from bench.gpu.cases import all_cases
from bench.gpu.compile import compile_case

runs = []
make_ir = compiler.ASTSource.make_ir
compiler.ASTSource.make_ir = lambda *args, **kwargs: runs.append(1) or make_ir(*args, **kwargs)
(case,) = (case for case in all_cases() if case.name == "rms_norm")


def num_runs(folder):
    os.environ["TRITON_CACHE_DIR"] = folder
    compile_case(case.build(torch.Generator().manual_seed(0), TINY).run, 90)
    return len(runs)


def in_a_fork(folder):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(num_runs, (folder,))


cache, carried, elsewhere = sys.argv[1:]
first = in_a_fork(cache)
shutil.copytree(cache, carried)
shutil.copytree(cache, elsewhere)
shutil.rmtree(cache)
there = in_a_fork(elsewhere)
shutil.copytree(carried, cache)
print(first, there, in_a_fork(cache))
"""


def test_a_copy_of_a_cache_is_found_in_the_place_of_the_first(tmp_path: Path) -> None:
    """And nowhere else: Triton notes whole paths in it."""
    folders = [str(tmp_path / name) for name in ("cache", "carried", "elsewhere")]
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, *folders], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "1", "0"]
