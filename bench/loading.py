"""Simulated time to load weights from disk to GPU. See bench/README.md.

Runs the real read-ahead (threads, order, bound) over tensors that have shapes but no memory.

    python -m bench.loading [--disk 1 3.5 7 14] [--link 25 55] [--host 5] [--speed-up 4]

All rates in GB/s. A reader copies a tensor into page-locked memory and digests it at --host once
the shared disk has delivered it; meanwhile the previous tensor crosses the link. Nothing is read or
copied: threads sleep, for 1/--speed-up of the time.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from engine.torch.weights import NUM_READERS, StoredTensor, Take, read_ahead


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a Llama 3 in bfloat16."""

    name: str
    hidden: int
    intermediate: int
    num_layers: int
    num_kv_heads: int
    vocab: int = 128_256
    head_dim: int = 128


SHAPES = (
    Shape("8B", 4096, 14_336, 32, 8),
    Shape("70B", 8192, 28_672, 80, 8),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second: disk, one reader's copy and digest, link to the GPU."""

    disk: float
    host: float
    link: float


@dataclass(frozen=True, slots=True)
class LoadTime:
    """Seconds. bound_s: of the slowest stage alone, as if the others were fully hidden."""

    num_bytes: int
    seconds: float
    bound_s: float


def tensors_of(shape: Shape) -> Iterator[StoredTensor]:
    """Tensors in the order of a checkpoint's files, as a single file."""
    hidden, kv = shape.hidden, shape.num_kv_heads * shape.head_dim
    layer = [
        (hidden,),
        (shape.intermediate, hidden),
        (shape.intermediate, hidden),
        (hidden, shape.intermediate),
        (hidden,),
        (hidden, hidden),
        (kv, hidden),
        (kv, hidden),
        (hidden, hidden),
    ]
    sizes = [(shape.vocab, hidden), *layer * shape.num_layers, (hidden,), (shape.vocab, hidden)]
    nothing = torch.zeros(1, dtype=torch.bfloat16)
    for index, size in enumerate(sizes):
        yield StoredTensor(0, Path(shape.name), f"tensor {index}", nothing.expand(size))


class Shared:
    """A resource that serves one request at a time, at a rate in bytes per second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._end_s = 0.0

    def pass_through(self, num_bytes: int) -> None:
        with self._lock:
            self._end_s = max(self._end_s, time.perf_counter()) + num_bytes / self._rate
            end_s = self._end_s
        time.sleep(max(0.0, end_s - time.perf_counter()))


def measure_loading(shape: Shape, rates: Rates, speed_up: float) -> LoadTime:
    """speed_up: ratio of simulated to real time."""
    disk, link = Shared(rates.disk * speed_up), Shared(rates.link * speed_up)
    num_bytes = sum(stored.tensor.nbytes for stored in tensors_of(shape))

    def read(mapped: torch.Tensor) -> tuple[torch.Tensor, str]:
        disk.pass_through(mapped.nbytes)
        time.sleep(mapped.nbytes / (rates.host * speed_up))
        return mapped, ""

    def take(tensor: torch.Tensor) -> None:
        link.pass_through(tensor.nbytes)

    def taker_of(*_: object) -> Take:
        return take

    begin_s = time.perf_counter()
    for _, taker, (tensor, _) in read_ahead(tensors_of(shape), taker_of, read):
        taker(tensor)
    seconds = (time.perf_counter() - begin_s) * speed_up
    slowest = min(rates.disk, rates.host * NUM_READERS, rates.link)
    return LoadTime(num_bytes, seconds, num_bytes / slowest)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--disk", type=float, nargs="+", default=[1.0, 3.5, 7.0, 14.0])
    parser.add_argument("--link", type=float, nargs="+", default=[25.0, 55.0])
    parser.add_argument("--host", type=float, default=5.0)
    parser.add_argument("--speed-up", type=float, default=4.0)
    arguments = parser.parse_args()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("model", "GB", "disk GB/s", "link GB/s", "slowest alone s", "load s", "times"):
        table.add_column(heading, justify="right", no_wrap=True)
    for shape in SHAPES:
        for disk in arguments.disk:
            for link in arguments.link:
                rates = Rates(disk * 1e9, arguments.host * 1e9, link * 1e9)
                one = measure_loading(shape, rates, arguments.speed_up)
                table.add_row(
                    shape.name,
                    f"{one.num_bytes / 1e9:.1f}",
                    f"{disk:g}",
                    f"{link:g}",
                    f"{one.bound_s:.1f}",
                    f"{one.seconds:.1f}",
                    f"{one.seconds / one.bound_s:.2f}",
                )
    Console().print(table)


if __name__ == "__main__":
    main()
