"""The native library: built from the C++ sources in this folder once per CPU level. The best level
of this machine is loaded.

Wheels and images contain all levels of their architecture, built by `python -m
baton_kernels.cpu.library`. A missing level is built on first use. BATON_CPU_LEVEL forces a lower
level, or `none`. The torch twins run with `none`, without a compiler, and on CPUs below every
level.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = tuple(sorted(_FOLDER.glob("*.cpp")))
_HEADERS = tuple(sorted(_FOLDER.glob("*.h")))
_CPU_INFO = Path("/proc/cpuinfo")
#: Forces a level lower than the machine's best.
LEVEL_VARIABLE = "BATON_CPU_LEVEL"
NO_LEVEL = "none"


@dataclass(frozen=True, slots=True)
class Level:
    """A target of compilation and the CPU features that it needs."""

    architecture: str
    #: Names of /proc/cpuinfo.
    instructions: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX512_BF16 = (*_AVX512, "avx512_bf16", "avx512_vnni")


def _x86(names: tuple[str, ...]) -> Level:
    return Level("x86_64", frozenset(names), tuple(f"-m{name.replace('_', '')}" for name in names))


#: By name, best of each architecture first. AMX would come before these.
LEVELS = {
    "avx512_bf16": _x86(_AVX512_BF16),
    "avx512": _x86(_AVX512),
    "avx2": _x86(_AVX2),
    "neon_bf16": Level(
        "aarch64", frozenset({"asimd", "bf16", "i8mm"}), ("-march=armv8.2-a+bf16+i8mm",)
    ),
    "neon": Level("aarch64", frozenset({"asimd"}), ()),
}
#: Instructions that add four products of bytes each; without them bytes are widened first.
_BYTE_PRODUCTS = frozenset({"avx512_vnni", "i8mm"})
#: No contraction: results must not depend on which operations a compiler fuses.
_FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-fno-exceptions", "-fno-rtti", "-fopenmp", "-fPIC", "-shared"),
)
_TIMEOUT_S = 300.0

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_CHECKED_COPY = (_POINTER, _POINTER, _LONG, ctypes.c_uint64, _POINTER)
_FUNCTIONS = {
    "baton_linear": (_POINTER, *(_POINTER,) * 3, _LONG, _INT, _INT, _POINTER, _INT),
    "baton_linear_scratch": (_POINTER, _POINTER),
    "baton_pack": (_POINTER, _LONG, _LONG, _POINTER, _INT),
    "baton_attention": (_POINTER, _INT, _INT),
    "baton_rms_norm": (
        *(_POINTER, _POINTER, _INT, ctypes.c_float),
        *(_POINTER, _LONG, _LONG),
        _INT,
        _INT,
    ),
    "baton_swiglu": (_POINTER, _POINTER, _LONG, _LONG, _INT, _INT),
    "baton_geglu": (_POINTER, _POINTER, _LONG, _LONG, _INT, _INT),
    "baton_clamped_swiglu": (_POINTER, _POINTER, _LONG, _LONG, _INT, _INT),
    "baton_route": (_POINTER, _INT),
    "baton_grouped_linear": (_POINTER, _INT, _INT),
    "baton_combine": (*(_POINTER,) * 5, *(_LONG,) * 3, _INT, _INT),
    "baton_rope_kv_write": (_POINTER, _INT, _INT),
    "baton_checked_gather": _CHECKED_COPY,
    "baton_checked_scatter": _CHECKED_COPY,
    "baton_word_sum": (_POINTER, _LONG, ctypes.c_uint64, _POINTER),
    "baton_checked_argmax": (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "baton_draw_rows": (_POINTER, _LONG, _LONG, *(_POINTER,) * 7, _INT),
    "baton_layers": (_POINTER, _LONG, _LONG, _INT, _INT),
}


class LevelError(ValueError):
    """BATON_CPU_LEVEL is no known level, or one that this machine lacks."""


def levels_of_machine(
    cpu_info: Path = _CPU_INFO, architecture: str | None = None
) -> tuple[str, ...]:
    """Levels that this CPU supports by its /proc/cpuinfo, best first. architecture: defaults to
    this machine's."""
    if not cpu_info.is_file():
        return ()
    lines = cpu_info.read_text().splitlines()
    described = (line for line in lines if line.startswith(("flags", "Features")))
    has = set(next(described, "").partition(":")[2].split())
    architecture = architecture or platform.machine()
    return tuple(
        name
        for name, level in LEVELS.items()
        if level.architecture == architecture and has >= level.instructions
    )


def choose_level(forced: str | None, available: tuple[str, ...]) -> str:
    """Choose the forced level, or the first of `available` (the machine's levels, best first).
    Raises LevelError."""
    if not forced:
        return available[0] if available else NO_LEVEL
    if forced in (*available, NO_LEVEL):
        return forced
    known = forced in LEVELS
    reason = "this machine lacks it" if known else "there is no such level"
    choices = ", ".join((*available, NO_LEVEL))
    raise LevelError(f"{LEVEL_VARIABLE}={forced}: {reason}; this machine has {choices}")


@cache
def chosen_level() -> str:
    """The level that this process should run at. Raises LevelError."""
    return choose_level(os.environ.get(LEVEL_VARIABLE), levels_of_machine())


@cache
def library() -> ctypes.CDLL | None:
    """The library of the chosen level with its functions declared; None if it cannot be loaded. The
    first call may build it, which takes seconds. Raises LevelError."""
    found = _load()
    return None if isinstance(found, str) else found


def why_none() -> str:
    """Try to load the library again and return the reason for failure; empty if it loads. Raises
    LevelError."""
    found = _load()
    return found if isinstance(found, str) else ""


def _load() -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    name = chosen_level()
    if name == NO_LEVEL:
        return f"{LEVEL_VARIABLE}={NO_LEVEL}" if levels_of_machine() else "this CPU has no level"
    try:
        path = find_or_build(name)
        # Load after torch, so that both share one OpenMP runtime (they request the same file name).
        found = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return _reason(error)
    for function_name, arguments in _FUNCTIONS.items():
        function = getattr(found, function_name)
        function.argtypes, function.restype = arguments, None
    return found


def level() -> str:
    """The level of the kernels, "none" for the torch twins. Loads the library. Raises
    LevelError."""
    return NO_LEVEL if library() is None else chosen_level()


def multiplies_bytes(level_name: str) -> bool:
    """Whether kernels of the level multiply bytes without widening them."""
    return bool(LEVELS[level_name].instructions & _BYTE_PRODUCTS)


@cache
def loaded() -> ctypes.CDLL:
    """The library. Raises RuntimeError if it is not loaded."""
    found = library()
    if found is None:
        raise RuntimeError("there are no native CPU kernels on this machine")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip()[-500:]
    return str(error)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "baton"


def file_name(level_name: str) -> str:
    """File name of a level's library, with a digest of the sources."""
    digest = hashlib.blake2b("\0".join(_command(level_name)).encode(), digest_size=8)
    for path in (*_SOURCES, *_HEADERS):
        digest.update(path.read_bytes())
    return f"kernels-{level_name}-{digest.hexdigest()}.so"


def find_or_build(level_name: str) -> Path:
    """Path of a level's library: beside the sources, or in a folder that only this user can write
    to."""
    name = file_name(level_name)
    if (_FOLDER / name).is_file():
        return _FOLDER / name
    folder = _cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.stat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        raise PermissionError(f"{folder}: others may write to it")
    if not (folder / name).is_file():
        # Lock: if several processes start at once, one builds and the others wait.
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / name).is_file():
                _log.info("building the native CPU kernels for %s, once per machine", level_name)
                build(level_name, folder / name)
        finally:
            os.close(lock)
    return folder / name


def _command(level_name: str) -> tuple[str, ...]:
    """Compiler arguments without file names."""
    return *_FLAGS, *LEVELS[level_name].flags


def build(
    level_name: str, path: Path, compiler: str | None = None, sources: Sequence[Path] = _SOURCES
) -> None:
    """Compile a library (by default the kernels) for any level, also one that this CPU lacks.
    compiler: defaults to this machine's. Raises FileNotFoundError without one,
    subprocess.SubprocessError if it fails, OSError."""
    compiler = compiler or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (c++, g++ or clang++)")
    command = (compiler, *_command(level_name))
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:

        def compiled(source: Path) -> Path:
            made = Path(scratch) / f"{source.stem}.o"
            _run(*command, f"-I{_FOLDER}", "-c", source, "-o", made)
            return made

        # The compiler uses one core per file.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sources))
        # Rename into place, so that concurrent builders and readers see complete files only.
        built = Path(scratch) / path.name
        _run(*command, *objects, "-o", built)
        built.replace(path)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)


def build_all(folder: Path) -> list[Path]:
    """Build the missing levels of this architecture in `folder`; return the paths of all. Raises as
    `build` does."""
    names = [name for name, of in LEVELS.items() if of.architecture == platform.machine()]
    paths = [folder / file_name(name) for name in names]
    missing = [(name, path) for name, path in zip(names, paths, strict=True) if not path.is_file()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, *zip(*missing, strict=True)) if missing else ())
    return paths


if __name__ == "__main__":
    build_all(_FOLDER)
