"""A contender that computes in this process: `python -m bench.peers.contender NAME MODEL DTYPE
THREADS [RANKS]`."""

from __future__ import annotations

import sys

import torch

from bench.peers.ours import BatonContender
from bench.peers.task import Contender, serve


def make(name: str, model: str, dtype: str, num_ranks: int = 1) -> Contender:
    """One of those that share this environment. num_ranks: of baton. Raises ValueError."""
    if name == "baton":
        return BatonContender(model, dtype, num_ranks)
    if name == "transformers":
        from bench.peers.transformers_peers import GenerateContender

        return GenerateContender(model, dtype)
    raise ValueError(f"{name!r} is no contender")


def main() -> None:
    """Serve tasks until stdin ends."""
    name, model, dtype, num_threads, *num_ranks = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    serve(make(name, model, dtype, *map(int, num_ranks)))


if __name__ == "__main__":
    main()
