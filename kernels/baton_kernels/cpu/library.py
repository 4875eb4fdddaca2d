"""The native library: built from the sources beside this file by the machine's own compiler, once per machine.

Without a compiler, or on another CPU, there is none, and the torch twins run. An image for machines without a compiler has
it built beforehand, beside the sources, by `python -m baton_kernels.cpu.library`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = (
    "linear.cpp",
    "attention.cpp",
    "pointwise.cpp",
    "layers.cpp",
    "checked_copy.cpp",
    "word_sum.cpp",
    "sampling.cpp",
)
_HEADERS = ("calls.h", "simd.h", "stored.h", "attention.h", "attention_many_rows.h")
_CPU_INFO = Path("/proc/cpuinfo")
_INSTRUCTIONS = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma"}
#: No contraction: a result must not depend on what a compiler fuses.
_FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-fno-exceptions", "-fno-rtti", "-fopenmp", "-fPIC", "-shared"),
    *("-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    *("-mavx512bf16", "-mavx512vnni"),
)
_TIMEOUT_S = 120.0

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_CHECKED_COPY = (
    *(_POINTER, _LONG, _LONG),
    *(_POINTER, _LONG, _POINTER),
    *(ctypes.c_uint64, _POINTER),
)
_FUNCTIONS = {
    "baton_linear": (_POINTER, *(_POINTER,) * 3, _LONG, _INT, _INT, _POINTER, _INT),
    "baton_attention": (_POINTER, _INT, _INT),
    "baton_rms_norm": (_POINTER, _POINTER, ctypes.c_float, _POINTER, _LONG, _LONG, _INT, _INT),
    "baton_swiglu": (_POINTER, _POINTER, _LONG, _LONG, _INT, _INT),
    "baton_rope_kv_write": (_POINTER, _INT, _INT),
    "baton_checked_gather": _CHECKED_COPY,
    "baton_checked_scatter": _CHECKED_COPY,
    "baton_word_sum": (_POINTER, _LONG, ctypes.c_uint64, _POINTER),
    "baton_checked_argmax": (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "baton_layers": (_POINTER, _LONG, _LONG, _INT, _INT),
}


@cache
def library() -> ctypes.CDLL | None:
    """The library, its functions declared; None where it cannot be had. A first call may take seconds to build it."""
    if not is_supported():
        return None
    try:
        path = _find_or_build()
        # Loaded after torch, so that both use one OpenMP runtime: they ask for the same file name.
        found = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _log.warning("no native CPU kernels, torch's operations run instead: %s", _reason(error))
        return None
    for name, arguments in _FUNCTIONS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


def loaded() -> ctypes.CDLL:
    """The library, where it is known to be there. Raises RuntimeError where it is not."""
    found = library()
    if found is None:
        raise RuntimeError("there are no native CPU kernels on this machine")
    return found


def is_supported(cpu_info: Path = _CPU_INFO) -> bool:
    """Whether this CPU has the instructions, as Linux tells it."""
    if not cpu_info.is_file():
        return False
    lines = cpu_info.read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.split()) >= _INSTRUCTIONS


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip()[-500:]
    return str(error)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "baton"


def _find_or_build() -> Path:
    """The library for these very sources: beside them, or in a folder that no one else may write to."""
    name = f"kernels-{_digest()}.so"
    if (_FOLDER / name).is_file():
        return _FOLDER / name
    folder = _cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.stat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        raise PermissionError(f"{folder}: others may write to it")
    if not (folder / name).is_file():
        _log.info("building the native CPU kernels, once per machine")
        build(folder / name)
    return folder / name


def _digest() -> str:
    digest = hashlib.blake2b("\0".join(_FLAGS).encode(), digest_size=8)
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_FOLDER / name).read_bytes())
    return digest.hexdigest()


def build(path: Path) -> None:
    """Raises FileNotFoundError without a compiler, subprocess.SubprocessError if it fails, OSError."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (c++, g++ or clang++)")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        # Moved into place whole: of two processes that build, each finds a whole file.
        built = Path(scratch) / path.name
        sources = [str(_FOLDER / name) for name in _SOURCES]
        command = [compiler, *_FLAGS, *sources, "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        built.replace(path)


if __name__ == "__main__":
    build(_FOLDER / f"kernels-{_digest()}.so")
