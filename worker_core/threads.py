"""CPU threads of a worker, which may change while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Threads:
    """num_now: threads that the engine computes with. num_started: as the worker was started.
    set_number: called by the engine loop between two steps."""

    num_started: int
    set_number: Callable[[int], None]
    num_now: int = 0

    def __post_init__(self) -> None:
        self.num_now = self.num_started

    def use(self, num_threads: int) -> None:
        """Compute with this many from now on; 0: as started."""
        wanted = num_threads or self.num_started
        if wanted != self.num_now:
            self.set_number(wanted)
            self.num_now = wanted
