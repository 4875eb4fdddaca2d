"""The kernels' own test program (program/test_kernels.cpp), over the library of every level that
this machine has; and, where there are a cross-compiler and an emulator, over those of aarch64.

Its results have the bits that they had when NUMERICS_VERSION was last raised.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from baton_kernels.cpu import library as library_module
from baton_kernels.cpu.library import LEVELS, build, file_name, find_or_build, levels_of_machine
from baton_kernels.version import NUMERICS_VERSION

#: A library that nobody has used yet is compiled first: that may take minutes on a busy machine.
pytestmark = pytest.mark.timeout(1200)

SOURCE = Path(__file__).parent / "program" / "test_kernels.cpp"
HEADERS = Path(library_module.__file__).parent
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
#: Where Debian keeps the loader and the libraries of programs for aarch64.
CROSS_ROOT = "/usr/aarch64-linux-gnu"

#: The version that BITS are of.
VERSION = 2
#: Digests of all results of the program's cases. A failure shows those that it found. If a kernel
#: gives other bits, raise NUMERICS_VERSION and VERSION and copy them here; without a higher version
#: workers that round differently would take each other for equal. If the program's cases alone
#: have changed, copy them and leave the version.
BITS = {
    level: {
        "linear": linear,
        "attention": attention,
        "rms_norm": "ac7d2dd5e945fa80",
        "swiglu": swiglu,
        "rope_kv_write": "94360dfdd4cc6def",
    }
    for level, linear, attention, swiglu in (
        ("avx512_bf16", "f23470e9e29b70d6", "c2ad7ea14419188c", "3a5cfc3b8ea3a431"),
        ("avx512", "89d9623ea1082b86", "25b864b21ad3e584", "3a5cfc3b8ea3a431"),
        ("avx2", "89d9623ea1082b86", "25b864b21ad3e584", "28af2af33eb5c2cf"),
        ("neon_bf16", "76632fa016d5c6f8", "b6a15582a29ffbca", "28af2af33eb5c2cf"),
        ("neon", "89d9623ea1082b86", "25b864b21ad3e584", "28af2af33eb5c2cf"),
    )
}


def run(*command: str | Path) -> str:
    """Its output. Fails the test if the command does."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def link(compiler: str, kernels: Path, program: Path, cache: Path) -> None:
    """Build the program over a level's library. What it is compiled to is kept in `cache`."""
    flags = ("-std=c++17", "-O1", "-Wall", "-Werror", f"-I{HEADERS}")
    digest = hashlib.blake2b(" ".join((compiler, *flags)).encode(), digest_size=8)
    for path in (SOURCE, HEADERS / "calls.h"):
        digest.update(path.read_bytes())
    compiled = cache / f"program-{digest.hexdigest()}.o"
    if not compiled.is_file():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            # Moved into place whole: of two tests that compile it, each finds a whole file.
            whole = Path(scratch) / compiled.name
            run(compiler, *flags, "-c", SOURCE, "-o", whole)
            whole.replace(compiled)
    run(compiler, compiled, kernels, f"-Wl,-rpath,{kernels.parent}", "-o", program)


def check(shown: str, level: str) -> None:
    assert shown.endswith(" 0 failed\n")
    found = dict(re.findall(r"^bits of (\w+) (\w+)$", shown, re.MULTILINE))
    assert (NUMERICS_VERSION, found) == (VERSION, BITS.get(level))


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> Path:
    """A folder that outlives the run."""
    return request.config.cache.mkdir("cpu_kernels")


#: Those between the best and the lowest are .ci/run's, as for the engines: see tests/conftest.py.
NATIVE = [
    pytest.param(level, marks=pytest.mark.long if level in levels_of_machine()[1:-1] else ())
    for level in levels_of_machine()
]


@pytest.mark.slow
@pytest.mark.parametrize("level", NATIVE)
def test_natively(level: str, tmp_path: Path, cache: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    link(compiler, find_or_build(level), tmp_path / "program", cache)
    check(run(tmp_path / "program"), level)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "level", [name for name, level in LEVELS.items() if level.architecture == "aarch64"]
)
def test_emulated(level: str, tmp_path: Path, cache: Path) -> None:
    missing = [name for name in (CROSS_COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} (g++-aarch64-linux-gnu, qemu-user-static)")
    kernels = cache / file_name(level)
    if not kernels.is_file():
        build(level, kernels, CROSS_COMPILER)
    link(CROSS_COMPILER, kernels, tmp_path / "program", cache)
    # One with nothing but what every aarch64 has, unless the level needs more.
    cpu = "max" if LEVELS[level].flags else "cortex-a72"
    emulated = (EMULATOR, "-L", CROSS_ROOT, "-cpu", cpu, tmp_path / "program")
    check(run(*emulated), level)
