"""Measures this machine as a Device: what Baton's own linear layers reach on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import MappingProxyType

import torch

from baton_kernels.linear import pack_linear
from engine.host_memory import available_memory_bytes
from engine.plan.devices import THIS_CPU, Device

#: Bytes of weights that are read: more than caches hold, or the model's, if they are fewer.
_MAX_BYTES = 256 << 20
_COPY_BYTES = 64 << 20
_NUM_IN, _NUM_OUT, _PROMPT_ROWS = 1024, 1024, 512
_NUM_ROUNDS = 5
#: Of one exchange through shared memory (docs/adr/0009).
_EXCHANGE_S = 38e-6


def measure_cpu(weight_bytes: int, dtype: str, num_ranks: int) -> Device:
    """The share of one of num_ranks ranks in this machine, with torch's number of threads.

    weight_bytes: of the model. Reading: linear layers of so many bytes with one row each.
    Computing: the same layers with 512 rows.
    """
    of_type = getattr(torch, dtype)
    one = torch.empty(_NUM_OUT, _NUM_IN, dtype=of_type).normal_()
    num_layers = max(1, min(weight_bytes, _MAX_BYTES) // (one.numel() * one.element_size()))
    layers = [pack_linear(one, None) for _ in range(num_layers)]
    row = torch.empty(1, _NUM_IN, dtype=of_type).normal_()
    rows = torch.empty(_PROMPT_ROWS, _NUM_IN, dtype=of_type).normal_()

    def run(x: torch.Tensor, num: int) -> Callable[[], object]:
        return lambda: [layer(x) for layer in layers[:num]]

    num_bytes = num_layers * one.numel() * one.element_size()
    num_computing = min(num_layers, 16)
    flops = 2.0 * _PROMPT_ROWS * one.numel() * num_computing
    source, target = torch.ones(2, _COPY_BYTES, dtype=torch.uint8)
    read_s, compute_s, copy_s = _best_s(
        run(row, num_layers), run(rows, num_computing), lambda: target.copy_(source)
    )
    return Device(
        THIS_CPU,
        "cpu",
        available_memory_bytes() // num_ranks,
        num_bytes / read_s / num_ranks,
        MappingProxyType(dict.fromkeys((dtype, "bfloat16"), flops / compute_s / num_ranks)),
        _COPY_BYTES / copy_s / num_ranks,
        _COPY_BYTES / copy_s / num_ranks,
        _EXCHANGE_S,
        f"measured here on {len(os.sched_getaffinity(0))} cores with Baton's linear layers",
        adds_up=True,
    )


def _best_s(*runs: Callable[[], object]) -> list[float]:
    """The best of some rounds of each, by turns."""
    best = [float("inf")] * len(runs)
    for _ in range(_NUM_ROUNDS):
        for index, run in enumerate(runs):
            started = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - started)
    return best
