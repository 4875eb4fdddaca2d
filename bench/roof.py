"""Measured upper bounds of this machine: memory reads, and products at the kernels' level.

    python -m bench.roof [--rows 1 2 3 4 5 6 7 8 9] [--dtype bfloat16] [--num-threads 1]
        [--rounds 15] [--beside LIBRARY]

Prints both, and the CPU time of the linear layers of one decoder layer of the 1.1B Llama shape by
rows (new tokens of a step), with its floor: the larger of the bytes of weights over the read roof
and the operations over the roof of products. The roofs are measured by the clock, so the floor is
too high on a busy machine. --beside: library of the same level that another
checkout made by `python -m baton_kernels.cpu.library`; both run by turns, and the command fails
where their results have other bits.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from baton_kernels.cpu.calling import STORED_NUMBERS
from baton_kernels.cpu.library import build, chosen_level, loaded
from baton_kernels.cpu.linear import NativeLinear
from baton_kernels.cpu.memory import host_memory

_READ_BYTES = 256 << 20
_PEAK_SOURCE = Path(__file__).with_name("peak.cpp")
_PEAK_STEPS = 4_000_000
#: [num_out, num_in] of queries, keys and values; output; gate and up; down.
_LAYER = ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632))
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """The linear layers of a decoder layer, run by any library of the kernels."""

    layers: tuple[NativeLinear, ...]
    dtype: torch.dtype

    @property
    def num_weights(self) -> int:
        return sum(layer.num_out * layer.num_in for layer in self.layers)

    def floor_s(self, num_rows: int, roof: Roof) -> float:
        """Least seconds that the roof allows."""
        read_s = self.num_weights * self.dtype.itemsize / roof.read_bytes_per_s
        return max(read_s, 2 * num_rows * self.num_weights / roof.flops_per_s)

    def run(
        self, library: ctypes.CDLL, inputs: list[torch.Tensor]
    ) -> tuple[float, list[torch.Tensor]]:
        """CPU seconds and results; inputs: one [rows, num_in] for each layer."""
        outputs = [
            x.new_empty(x.shape[0], layer.num_out)
            for layer, x in zip(self.layers, inputs, strict=True)
        ]
        largest = max(layer.scratch_row_bytes for layer in self.layers)
        scratch = torch.empty(max(1, inputs[0].shape[0] * largest), dtype=torch.uint8)
        started_s = time.process_time()
        for layer, x, out in zip(self.layers, inputs, outputs, strict=True):
            library.baton_linear(
                *(layer.address, x.data_ptr(), None, out.data_ptr(), x.shape[0]),
                *(STORED_NUMBERS.get(x.dtype), x.dtype == torch.float32),
                *(scratch.data_ptr(), torch.get_num_threads()),
            )
        return time.process_time() - started_s, outputs


def _library_of(path: Path) -> ctypes.CDLL:
    """Load another library of the kernels. Raises OSError."""
    other = ctypes.CDLL(str(path.resolve()))
    other.baton_linear.argtypes, other.baton_linear.restype = loaded().baton_linear.argtypes, None
    return other


def _median_times_s(
    libraries: list[ctypes.CDLL], layers: LinearLayers, num_rows: int, num_rounds: int
) -> list[float]:
    """Median CPU seconds by library, which run by turns. Raises SystemExit where bits differ."""
    generator = torch.Generator().manual_seed(num_rows)
    inputs = [
        torch.randn(num_rows, layer.num_in, generator=generator).to(layers.dtype)
        for layer in layers.layers
    ]
    times_s: list[list[float]] = [[] for _ in libraries]
    for _ in range(num_rounds + 1):
        results = [layers.run(library, inputs) for library in libraries]
        for taken, (time_s, outputs) in zip(times_s, results, strict=True):
            taken.append(time_s)
            if not all(map(torch.equal, outputs, results[0][1])):
                raise SystemExit(f"{num_rows} rows: the two libraries give different results")
    return [statistics.median(taken[1:]) for taken in times_s]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(1, 10)))
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--beside", type=Path, metavar="LIBRARY")
    given = parser.parse_args()
    torch.set_num_threads(given.num_threads)
    roof = measure_roof()
    read_gb, giga = roof.read_bytes_per_s / 1e9, roof.flops_per_s / 1e9
    print(f"{chosen_level()}: reads {read_gb:.1f} GB/s, products {giga:.0f} GFLOP/s\n")
    generator = torch.Generator().manual_seed(0)
    dtype = _DTYPES[given.dtype]
    weights = (torch.randn(*shape, generator=generator).to(dtype) for shape in _LAYER)
    layers = LinearLayers(tuple(NativeLinear(weight, None) for weight in weights), dtype)
    libraries = [loaded()] + ([_library_of(given.beside)] if given.beside else [])
    print("| Rows | Floor, CPU ms | CPU ms |" + (" beside | ratio |" if given.beside else ""))
    print("|---|---|---|" + ("---|---|" if given.beside else ""))
    for num_rows in given.rows:
        floor_s = layers.floor_s(num_rows, roof) * given.num_threads
        times_s = _median_times_s(libraries, layers, num_rows, given.rounds)
        figures = [f"{1e3 * each:.2f}" for each in (floor_s, *times_s)]
        if given.beside:
            figures.append(f"{times_s[1] / times_s[0]:.2f}")
        print(f"| {num_rows} | " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
