"""Whether the engine keeps others from Python's lock: `python -m bench.gil [MODEL] [--batch N]
[--seconds S]`.

A worker's engine loop is a thread beside the asyncio loop that serves gRPC. Here an engine decodes
in one thread while another does what an event loop does: it wakes from a socket, over and over.
Told are the times from writing to the socket to having run in Python, with the engine idle and
decoding, in turns; what they differ by is waiting for the lock, and for a core if there are too
few.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.measure import distribution
from bench.peers.ours import BatonContender
from bench.peers.task import Task

_BOX_MODEL = str(Path(__file__).parents[1] / "models" / "baton-py-6m")
_ROUNDS = 3
_PAUSE_S = 0.002


@contextmanager
def decoding(contender: BatonContender, batch: int) -> Iterator[None]:
    """Steps in another thread, until the end of the block."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            contender.run(Task(batch, 64, 32))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def wake_up_times(seconds: float) -> list[float]:
    """Milliseconds from a byte's being sent to Python's having it."""
    left, right = socket.socketpair()
    right.settimeout(_PAUSE_S)
    times = []
    with left, right:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            # Waiting in the kernel without the lock, as an event loop does.
            try:
                right.recv(1)
            except TimeoutError:
                sent = time.perf_counter()
            left.send(b"x")
            right.recv(1)
            times.append((time.perf_counter() - sent) * 1e3)
    return times


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default=_BOX_MODEL)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    contender = BatonContender(given.model)
    contender.run(Task(given.batch, 64, 32))
    idle: list[float] = []
    busy: list[float] = []
    for _ in range(_ROUNDS):
        idle += wake_up_times(given.seconds / _ROUNDS)
        with decoding(contender, given.batch):
            busy += wake_up_times(given.seconds / _ROUNDS)
    for name, times in (("idle", idle), ("decoding", busy)):
        found = distribution(times)
        sys.stdout.write(
            f"engine {name}: {found.count} wake-ups, p50 {found.p50:.3f} ms, "
            f"p99 {found.p99:.3f} ms, max {found.max:.3f} ms\n"
        )


if __name__ == "__main__":
    main()
