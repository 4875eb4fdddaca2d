"""The kernels' own test program (program/test_kernels.cpp), over the library of every level that
this machine has; and, where there are a cross-compiler and an emulator, over that of aarch64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from baton_kernels.cpu import library as library_module
from baton_kernels.cpu.library import LEVELS, build, file_name, find_or_build, levels_of_machine

#: A library that nobody has used yet is compiled first: that may take minutes on a busy machine.
pytestmark = pytest.mark.timeout(1200)

SOURCE = Path(__file__).parent / "program" / "test_kernels.cpp"
HEADERS = Path(library_module.__file__).parent
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
#: Where Debian keeps the loader and the libraries of programs for aarch64.
CROSS_ROOT = "/usr/aarch64-linux-gnu"


def run(*command: str | Path) -> str:
    """Its output. Fails the test if the command does."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def link(compiler: str, kernels: Path, program: Path) -> None:
    flags = ("-std=c++17", "-O1", "-Wall", "-Werror", f"-I{HEADERS}")
    run(compiler, *flags, SOURCE, kernels, f"-Wl,-rpath,{kernels.parent}", "-o", program)


@pytest.mark.parametrize("level", levels_of_machine())
def test_natively(level: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    link(compiler, find_or_build(level), tmp_path / "program")
    assert run(tmp_path / "program").endswith(" 0 failed\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "level", [name for name, level in LEVELS.items() if level.architecture == "aarch64"]
)
def test_emulated(level: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    missing = [name for name in (CROSS_COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} (g++-aarch64-linux-gnu, qemu-user-static)")
    kernels = request.config.cache.mkdir("cpu_kernels") / file_name(level)
    if not kernels.is_file():
        build(level, kernels, CROSS_COMPILER)
    link(CROSS_COMPILER, kernels, tmp_path / "program")
    # One with nothing but what every aarch64 has, unless the level needs more.
    cpu = "max" if LEVELS[level].flags else "cortex-a72"
    emulated = (EMULATOR, "-L", CROSS_ROOT, "-cpu", cpu, tmp_path / "program")
    assert run(*emulated).endswith(" 0 failed\n")
