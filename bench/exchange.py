"""Times of an exchange of two ranks, by turns over each backend: `python -m bench.exchange`.

Prints the median of each backend and shape in microseconds, twice, so that a backend is also
compared with itself, and the median of rank 0's CPU time. The ranks are forked processes.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import torch

from engine.families.read import read_config
from engine.ranks.backends import BACKENDS
from engine.ranks.exchange import Ranks
from engine.ranks.mesh import Degrees
from engine.ranks.rank_spec import RankSpec

_NAMES = ("shm", "gloo")
#: Rows and columns of a rank's part, float32: of steps of one and of eight sequences, and of a
#: chunk of a prompt.
_SHAPES = ((1, 384), (8, 384), (512, 1024))
_NUM_TURNS, _NUM_EXCHANGES = 12, 40
_MODEL = Path(__file__).parents[1] / "models" / "baton-py-6m"


def _spec(backend: str) -> RankSpec:
    config = read_config(_MODEL)
    return RankSpec(
        *(0, Degrees(2), backend, str(_MODEL), config, "float32", (), 1, 1 << 20),
        max_num_rows=1,
    )


def _turns(ranks: dict[str, Ranks]) -> Iterator[tuple[tuple[int, int], str, float, float]]:
    """Shape, backend, and seconds of an exchange, by the clock and of CPU time, in an order that
    both ranks have."""
    for shape in _SHAPES:
        part = torch.ones(shape)
        for turn in range(_NUM_TURNS):
            for name in _NAMES if turn % 2 else reversed(_NAMES):
                ranks[name].meet()
                begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
                for _ in range(_NUM_EXCHANGES):
                    ranks[name].gather(part)
                seconds = (time.perf_counter() - begin_s) / _NUM_EXCHANGES
                cpu_s = (time.process_time() - begin_cpu_s) / _NUM_EXCHANGES
                yield shape, name, seconds, cpu_s


def _run(rank: int, specs: dict[str, RankSpec]) -> None:
    """Take all turns; rank 0 prints."""
    own = {name: replace(specs[name], rank=rank) for name in _NAMES}
    ranks = {name: BACKENDS[name]().join(own[name]).tensor for name in _NAMES}
    found: dict[tuple[tuple[int, int], str], list[tuple[float, float]]] = {}
    for shape, name, seconds, cpu_s in _turns(ranks):
        found.setdefault((shape, name), []).append((seconds * 1e6, cpu_s * 1e6))
    for (shape, name), turns in found.items() if rank == 0 else ():
        times, cpu_times = zip(*turns, strict=True)
        halves = (statistics.median(times[half::2]) for half in (0, 1))
        text = ", ".join(f"{us:.0f} us" for us in halves)
        cpu = f"{statistics.median(cpu_times):.0f} us of CPU time"
        print(f"{shape[0]} x {shape[1]} {name}: {text}; {cpu}", flush=True)


def main() -> int:
    torch.set_num_threads(1)
    backends = {name: BACKENDS[name]() for name in _NAMES}
    specs = {name: backends[name].open(_spec(name)) for name in _NAMES}
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_run, args=(rank, specs), daemon=True) for rank in range(2)]
    for each in ranks:
        each.start()
    # A rank waits for ever for one that has died: the first failure ends both.
    while any(each.exitcode is None for each in ranks):
        wait([each.sentinel for each in ranks if each.exitcode is None])
        if any(each.exitcode for each in ranks):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
