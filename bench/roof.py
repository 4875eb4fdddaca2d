"""What this machine can do at best, measured: reading memory, and multiplying bfloat16 matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton_kernels.cpu.memory import host_memory

_READ_BYTES = 256 << 20
_SIZE = 1536


@dataclass(frozen=True, slots=True)
class Roof:
    """Bytes read and floating point operations, per second."""

    read_bytes_per_s: float
    bf16_flops_per_s: float


def measure_roof(num_rounds: int = 5) -> Roof:
    """The best of some rounds, with torch's current number of threads."""
    memory = host_memory(_READ_BYTES).view(torch.float32).fill_(1)
    left, right = (torch.randn(_SIZE, _SIZE).bfloat16() for _ in range(2))
    return Roof(
        _READ_BYTES / _best_s(memory.sum, num_rounds),
        2 * _SIZE**3 / _best_s(lambda: left @ right, num_rounds),
    )


def _best_s(run: Callable[[], object], num_rounds: int) -> float:
    run()
    times = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
