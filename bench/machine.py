"""Records machine, versions and commit of a measurement, writes its results, and forces a CPU level
on Baton and its peers."""

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
    """The host: CPU, usable cores, memory in bytes, load average, GPUs."""
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
    """Versions of Python and of the installed packages that matter."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def describe_commit(root: Path = ROOT) -> dict[str, object]:
    """Commit of the checkout, and whether files differ from it; empty outside a checkout."""
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
    """Output of a program; empty if it is missing or fails."""
    path = shutil.which(program)
    if path is None:
        return ""
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def now() -> str:
    """Current UTC date and time, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def document_of(module: str, started: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Document of a finished measurement. Its load average includes the measurement's own load."""
    return {
        "command": ["python", "-m", module, *map(shown, sys.argv[1:])],
        "started": started,
        "git": describe_commit(),
        "machine": describe_machine(),
        "versions": describe_versions(),
        **data,
    }


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document, with paths as text. Raises OSError."""
    text = json.dumps(document, indent=2, allow_nan=False, default=str)
    path.write_text(f"{text}\n", encoding="utf-8")


def publish(
    document: Mapping[str, Any], path: Path | None, *tables: Callable[[Mapping[str, Any]], str]
) -> None:
    """Print a measurement as Markdown, and write it to a file if a path is given. tables: Markdown
    of the document. Raises OSError."""
    for table in tables:
        print(table(document), end="\n\n")
    if path:
        write_json(path, document)


def shown(argument: str) -> str:
    """An argument for publication: a path is reduced to its file name."""
    return Path(argument).name if argument.startswith("/") else argument


#: Environment that limits torch to a level's instructions. oneDNN has no level between VNNI and
#: BF16: its bfloat16 products may use VNNI at avx512, which Baton's do not.
_TORCH: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "ATEN_CPU_CAPABILITY": "avx512"},
    }
)


def forced_level() -> str:
    """The forced level; empty for the machine's best."""
    return os.environ.get(LEVEL_VARIABLE, "")


def level_environment(level: str) -> dict[str, str]:
    """Environment of a process at a level; empty level: the machine's best."""
    forced = {LEVEL_VARIABLE: level, **_TORCH.get(level, {})} if level else {}
    return {**os.environ, **forced}
