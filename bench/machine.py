"""Where and with what a measurement was made, so that a figure can be judged later; how it is kept;
and the CPU level that is forced on whatever is measured beside Baton, too."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton_kernels.cpu.library import LEVEL_VARIABLE, level

_PACKAGES = ("baton", "torch", "transformers", "grpcio", "protobuf", "uvloop", "numpy", "triton")
ROOT = Path(__file__).resolve().parents[1]
BUNDLED_MODEL = str(ROOT / "models" / "baton-py-6m")


def describe_machine() -> dict[str, object]:
    """The host: CPU, cores this process may use, memory in bytes, load average, GPUs."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_level": level(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": list(os.getloadavg()),
        "gpus": _gpus(),
    }


def describe_versions() -> dict[str, str]:
    """Python, and the installed ones of the packages that matter."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def describe_commit(root: Path = ROOT) -> dict[str, object]:
    """The commit of the checkout, and whether files differ from it; nothing outside a checkout."""
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if not commit:
        return {}
    status = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "is_dirty": bool(status)}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else platform.processor()
    found = re.search(r"^model name\s*: *(.*)", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _gpus() -> list[str]:
    listed = _output(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    return listed.splitlines()


def _output(program: str, *arguments: str) -> str:
    """What a program prints; nothing if it is not here or fails."""
    path = shutil.which(program)
    if path is None:
        return ""
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def now() -> str:
    """Date and time, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def document_of(module: str, started: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Made when the measurement ends: its load average is that of the machine then, this
    measurement's own included."""
    return {
        "command": ["python", "-m", module, *map(shown, sys.argv[1:])],
        "started": started,
        "git": describe_commit(),
        "machine": describe_machine(),
        "versions": describe_versions(),
        **data,
    }


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document, paths in it as text. Raises OSError."""
    text = json.dumps(document, indent=2, allow_nan=False, default=str)
    path.write_text(f"{text}\n", encoding="utf-8")


def publish(
    document: Mapping[str, Any], path: Path | None, *tables: Callable[[Mapping[str, Any]], str]
) -> None:
    """Print what was measured as its page shows it, and keep it in a file if one is named. tables:
    Markdown of the document. Raises OSError."""
    for table in tables:
        print(table(document), end="\n\n")
    if path:
        write_json(path, document)


def shown(argument: str) -> str:
    """An argument as others may read it: of a file somewhere on this machine, the name."""
    return Path(argument).name if argument.startswith("/") else argument


#: What makes torch take no instructions above a level's. oneDNN knows no level between VNNI and
#: BF16: its products of bfloat16 may use VNNI at avx512, which ours do not.
_TORCH: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "ATEN_CPU_CAPABILITY": "avx512"},
    }
)


def forced_level() -> str:
    """Empty where the machine's best is measured."""
    return os.environ.get(LEVEL_VARIABLE, "")


def level_environment(level: str) -> dict[str, str]:
    """Of a process that measures at a level; empty: the best."""
    forced = {LEVEL_VARIABLE: level, **_TORCH.get(level, {})} if level else {}
    return {**os.environ, **forced}
