"""A contender that computes in this process: `python -m bench.peers.contender NAME MODEL DTYPE
THREADS`."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch

from bench.peers.ours import BatonContender, without_native_kernels
from bench.peers.task import Contender, serve


def make(name: str, model: str, dtype: str) -> Contender:
    """One of those that share this environment. Raises ValueError."""
    if name in {"baton", "baton-twins"}:
        return BatonContender(model, dtype)
    from bench.peers.transformers_peers import ContinuousBatchingContender, GenerateContender

    if name == "transformers":
        return GenerateContender(model, dtype)
    if name == "continuous-batching":
        return ContinuousBatchingContender(model, dtype)
    raise ValueError(f"{name!r} is no contender")


def main() -> None:
    """Serve tasks until stdin ends."""
    name, model, dtype, num_threads = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    with ExitStack() as stack:
        if name == "baton-twins":
            stack.enter_context(without_native_kernels())
        serve(make(name, model, dtype))


if __name__ == "__main__":
    main()
