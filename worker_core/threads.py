"""CPU threads of a worker, which may change while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton.numa import keep_to, node_of

_log = logging.getLogger("baton.worker")


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


def keep_to_numa_node(number: int) -> None:
    """Keep this thread, and all that it starts from now on, to a NUMA node. Raises ConfigError if
    this process may not use it."""
    node = node_of(number)
    prefers = keep_to(node)
    memory = "its memory first" if prefers else "not to its memory, which the kernel refuses"
    _log.info("kept to the %d cores of NUMA node %d, %s", len(node.cores), number, memory)
