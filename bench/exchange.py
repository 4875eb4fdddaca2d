"""Times of an exchange of two ranks, by turns over each backend: `python -m bench.exchange`.

Prints the median of each backend and shape in microseconds, twice, so that a backend is also
compared with itself. Rank 1 is a forked process.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
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


def _turns(ranks: dict[str, Ranks]) -> Iterator[tuple[tuple[int, int], str, float]]:
    """Shape, backend, and seconds of an exchange, in an order that both ranks have."""
    for shape in _SHAPES:
        part = torch.ones(shape)
        for turn in range(_NUM_TURNS):
            for name in _NAMES if turn % 2 else reversed(_NAMES):
                ranks[name].meet()
                begin_s = time.perf_counter()
                for _ in range(_NUM_EXCHANGES):
                    ranks[name].gather(part)
                yield shape, name, (time.perf_counter() - begin_s) / _NUM_EXCHANGES


def main() -> None:
    torch.set_num_threads(1)
    backends = {name: BACKENDS[name]() for name in _NAMES}
    specs = {name: backends[name].open(_spec(name)) for name in _NAMES}
    is_first = os.fork() != 0
    rank = 0 if is_first else 1
    own = {name: replace(specs[name], rank=rank) for name in _NAMES}
    ranks = {name: BACKENDS[name]().join(own[name]).tensor for name in _NAMES}
    found: dict[tuple[tuple[int, int], str], list[float]] = {}
    for shape, name, seconds in _turns(ranks):
        found.setdefault((shape, name), []).append(seconds * 1e6)
    if not is_first:
        os._exit(0)
    os.wait()
    for (shape, name), times in found.items():
        halves = (statistics.median(times[half::2]) for half in (0, 1))
        print(f"{shape[0]} x {shape[1]} {name}:", ", ".join(f"{us:.0f} us" for us in halves))


if __name__ == "__main__":
    main()
