"""Where and with what a measurement was made, so that a figure can be judged later."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from baton_kernels.cpu.library import level

_PACKAGES = ("baton", "torch", "transformers", "grpcio", "protobuf", "uvloop", "numpy", "triton")
_ROOT = Path(__file__).resolve().parents[1]


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


def describe_commit(root: Path = _ROOT) -> dict[str, object]:
    """The commit of the checkout, and whether files differ from it; nothing outside a checkout."""
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if not commit:
        return {}
    status = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "is_dirty": bool(status)}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor()
    names = (
        line.partition(":")[2].strip()
        for line in cpuinfo.read_text().splitlines()
        if line.startswith("model name")
    )
    return next(names, platform.machine())


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
