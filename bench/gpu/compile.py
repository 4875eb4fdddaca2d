"""Compiles kernels ahead of time for a GPU that this machine lacks.

python -m bench.gpu.compile [--arch 90] [--tiles]

Runs each case of `cases.py` on CPU tensors, with Triton set to compile launches instead of running
them, so that tiles, options and specialisations are those of a GPU. Needs Triton, with its
interpreter off. --tiles: attention in every tile class, by numbers of new tokens, besides.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.gpu.attention_cases import attention_cases
from bench.gpu.case import TINY, Case, Sizes
from bench.gpu.cases import all_cases

#: Compute capability times ten: Ampere (A100), Hopper (H100, H200), Blackwell (B200).
ARCHS = (80, 90, 100)
#: Maximum shared memory of a program, in bytes, by arch.
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

_ASYNC_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], (0x[0-9a-f]+|\d+)")
_NARROW_LOAD = re.compile(r"ld\.global[.\w:]*\.[bus](?:8|16) ")

#: New tokens times heads that share a KV head, one number for each size of BLOCK_M.
TILE_ROWS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel compiled for an arch. Registers are per thread; stack_bytes, per thread, is spilled
    memory. async_bytes: sizes of its asynchronous copies. num_narrow_loads: of 1 or 2 bytes, in its
    code."""

    kernel: str
    num_warps: int
    num_stages: int
    num_registers: int
    stack_bytes: int
    shared_bytes: int
    async_bytes: tuple[int, ...]
    num_narrow_loads: int


class _AbsentGpu:
    """The driver interface that Triton queries before it compiles."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        # Triton caches kernels by device: use each arch as a device.
        return int(self._target.arch)

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def _compiling(arch: int) -> Iterator[list[Any]]:
    """Within the context launches compile; the list collects the compiled kernels."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:  # noqa: ARG001
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    before = driver._active
    driver.set_active(_AbsentGpu(arch))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = before


def compile_case(call: Callable[[], object], arch: int) -> list[Compiled]:
    """Compile every distinct kernel that `call` launches. Raises Triton's error for a kernel that
    the arch cannot run."""
    with _compiling(arch) as kernels:
        call()
    return [_describe(kernel) for kernel in dict.fromkeys(kernels)]


def _describe(kernel: Any) -> Compiled:
    usage = _resource_usage(kernel.asm["cubin"])
    metadata = kernel.metadata
    return Compiled(
        metadata.name,
        metadata.num_warps,
        metadata.num_stages,
        usage["REG"],
        usage["STACK"],
        metadata.shared,
        _async_bytes(kernel.asm["ptx"]),
        len(_NARROW_LOAD.findall(kernel.asm["ptx"])),
    )


def _async_bytes(ptx: str) -> tuple[int, ...]:
    return tuple(sorted({int(size, 0) for size in _ASYNC_COPY.findall(ptx)}))


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def tile_cases() -> list[tuple[str, Case, Sizes]]:
    """Attention cases with one sequence of so many new tokens that each tile class is reached."""
    group = TINY.heads[0] // TINY.heads[1]
    return [
        (f"{case.name}, {rows} rows", case, replace(TINY, lengths=((70, rows // group),)))
        for case in attention_cases()
        if case.name.startswith("attention")
        for rows in TILE_ROWS
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of the compiled kernels of all cases."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.compile", description=__doc__)
    parser.add_argument("--arch", type=int, choices=ARCHS, action="append", help="default: all")
    parser.add_argument("--tiles", action="store_true", help="attention in every tile class, too")
    options = parser.parse_args(arguments)
    print(f"Triton {triton.__version__}")
    print("arch  regs  stack  shared KiB  warps  stages  async bytes  narrow loads  case / kernel")
    cases = [(case.name, case, TINY) for case in all_cases()]
    for arch in options.arch or ARCHS:
        for name, case, sizes in [*cases, *(tile_cases() if options.tiles else ())]:
            if case.min_arch > arch:
                continue
            trial = case.build(torch.Generator().manual_seed(0), sizes)
            for one in compile_case(trial.run, arch):
                print(
                    f"{arch:4}  {one.num_registers:4}  {one.stack_bytes:5}"
                    f"  {one.shared_bytes / 1024:10.1f}  {one.num_warps:5}  {one.num_stages:6}"
                    f"  {'/'.join(map(str, one.async_bytes)) or '-':>11}  {one.num_narrow_loads:12}"
                    f"  {name} / {one.kernel}"
                )


if __name__ == "__main__":
    main()
