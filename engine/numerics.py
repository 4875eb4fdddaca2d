"""The numerics class of an engine on this machine."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import torch

from baton.errors import StartupError
from baton.types import NO_LEVEL, NumericsClass
from baton_kernels.cpu.library import LevelError, level
from baton_kernels.version import NUMERICS_VERSION
from engine.ranks.mesh import Degrees

#: CPU flags that affect oneDNN's choice of products, besides the capability that torch reports.
_PRODUCT_FLAGS = frozenset({"avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "bf16"})
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_CPU_INFO = Path("/proc/cpuinfo")


def cpu_level() -> str:
    """Level of the CPU kernels. Raises StartupError if BATON_CPU_LEVEL names a level that this
    machine lacks."""
    try:
        return level()
    except LevelError as error:
        raise StartupError(str(error)) from None


def sums_of(degrees: Degrees, backend: str) -> str:
    """What sums depend on besides the kernels, as a part of a class: the number of their parts, and
    the backend if it chooses their order; empty if each is taken by one rank."""
    if degrees.num_summands == 1:
        return ""
    return f"sums{degrees.num_summands}{'nccl' if backend == 'nccl' else ''}"


def numerics_of(device: torch.device, dtype: str, kernels: str = "") -> NumericsClass:
    """Numerics class of an engine on `device` that computes in `dtype`. kernels: names and versions
    of other kernels that tokens depend on, and `sums_of`.

    torch's part (sums of probabilities for top_p and log probabilities) is rounded according to its
    version and instruction set; without native kernels, oneDNN's products are, too. Raises
    StartupError as cpu_level does.
    """
    torch_version = f"torch{torch.__version__.partition('+')[0]}"
    if kernels:
        torch_version = f"{torch_version}.{kernels}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        beside = f"{torch_version}.triton{metadata.version('triton')}"
        return NumericsClass("cuda", f"sm_{major}{minor}", dtype, f"{NUMERICS_VERSION}+{beside}")
    name = cpu_level()
    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "")
    beside = f"{torch_version}.{capability}"
    if name == NO_LEVEL:
        beside = ".".join((beside, *sorted(_PRODUCT_FLAGS & _cpu_flags())))
    return NumericsClass("cpu", name, dtype, f"{NUMERICS_VERSION}+{beside}")


def has_bfloat16_products() -> bool:
    """Whether this CPU, and therefore torch, multiplies bfloat16 in hardware."""
    return not _BFLOAT16_FLAGS.isdisjoint(_cpu_flags())


def _cpu_flags() -> frozenset[str]:
    """Flags of the first CPU in /proc/cpuinfo; empty if there is none."""
    if not _CPU_INFO.is_file():
        return frozenset()
    lines = _CPU_INFO.read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())
