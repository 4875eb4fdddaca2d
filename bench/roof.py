"""Measured upper bounds of this machine: memory reads, and products at the kernels' level."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from baton_kernels.cpu.library import build, chosen_level
from baton_kernels.cpu.memory import host_memory

_READ_BYTES = 256 << 20
_PEAK_SOURCE = Path(__file__).with_name("peak.cpp")
_PEAK_STEPS = 4_000_000


@dataclass(frozen=True, slots=True)
class Roof:
    """Bytes read and floating point operations, per second; operations are bfloat16 products if the
    level has them, else float32."""

    read_bytes_per_s: float
    flops_per_s: float


def measure_roof(num_rounds: int = 5) -> Roof:
    """The best of some rounds, with torch's current number of threads."""
    memory = host_memory(_READ_BYTES).view(torch.float32).fill_(1)
    peak = _peak()
    threads = torch.get_num_threads()
    operations = float(peak(_PEAK_STEPS, threads))
    return Roof(
        _READ_BYTES / _best_s(memory.sum, num_rounds),
        operations / _best_s(lambda: peak(_PEAK_STEPS, threads), num_rounds),
    )


@cache
def _peak() -> Callable[[int, int], float]:
    """The function of bench/peak.cpp, compiled for the level. Raises as library.build does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peak.so"
        build(chosen_level(), path, sources=(_PEAK_SOURCE,))
        function = ctypes.CDLL(str(path)).baton_peak
    function.argtypes, function.restype = (ctypes.c_long, ctypes.c_int), ctypes.c_double
    found: Callable[[int, int], float] = function
    return found


def _best_s(run: Callable[[], object], num_rounds: int) -> float:
    run()
    times = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
