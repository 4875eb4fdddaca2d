"""Where an item of the benchmark runs, its sizes, and its timing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: Results of an item: times in ms, minimum bytes moved and floating-point operations, errors.
Result = Mapping[str, float | str]

_NUM_REPLAYS = 9
_TARGET_MS = 20.0


@dataclass(frozen=True, slots=True)
class Setting:
    """device: cuda, or cpu in a dry run, which uses the smallest sizes and gives no meaningful
    times.

    half: the 16-bit dtype, float16 in a dry run: the interpreter's bfloat16 products are wrong.
    is_rehearsal: run everything once, to compile kernels; times mean nothing.
    """

    device: torch.device
    half: torch.dtype
    seed: int
    is_rehearsal: bool = False

    @property
    def is_dry(self) -> bool:
        return self.device.type == "cpu"

    def generator(self) -> torch.Generator:
        """A new generator: inputs differ in every run."""
        return torch.Generator(self.device).manual_seed(self.seed)

    def randn(self, *shape: int) -> torch.Tensor:
        """Random numbers of the 16-bit dtype."""
        return torch.randn(shape, generator=self.generator(), device=self.device).to(self.half)

    def pick(self, real: int, dry: int) -> int:
        """`dry` in a dry run, else `real`."""
        return dry if self.is_dry else real


def time_ms(run: Callable[[], object], setting: Setting) -> float:
    """Median time of one call. On a GPU calls are captured in a CUDA graph, which excludes launch
    overhead."""
    if setting.is_dry or setting.is_rehearsal:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1000
    run()
    once = _time_events(run)
    count = max(1, min(50, int(_TARGET_MS / max(once, 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    graph.replay()
    return statistics.median(_time_events(graph.replay) / count for _ in range(_NUM_REPLAYS))


def time_eager_ms(run: Callable[[], object], setting: Setting) -> float:
    """Median time of one call launched by Python, including waits on the host."""
    if setting.is_dry or setting.is_rehearsal:
        return time_ms(run, setting)
    for _ in range(3):
        run()
    return statistics.median(_time_events(run) for _ in range(_NUM_REPLAYS))


def _time_events(run: Callable[[], object]) -> float:
    make_event: Any = torch.cuda.Event
    start, end = (make_event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
