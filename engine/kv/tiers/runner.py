"""A tier's own thread: it alone waits for the tier's device."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Protocol

Job = Callable[[], None]


class Runner(Protocol):
    """Runs jobs one after another, urgent ones first, each kind in order of submission."""

    def submit(self, job: Job, *, is_urgent: bool = False) -> None:
        """Queue a job, without waiting. Thread-safe."""
        ...

    def close(self, last: Job) -> None:
        """Run `last` after all jobs and end. Waits, but not for a device that does not answer."""
        ...


class InlineRunner:
    """Implements Runner: runs each job at once, in the caller's thread."""

    def submit(self, job: Job, *, is_urgent: bool = False) -> None:
        del is_urgent
        job()

    def close(self, last: Job) -> None:
        last()


class ThreadRunner:
    """Implements Runner."""

    def __init__(
        self, name: str, on_error: Callable[[Exception], None], close_timeout_s: float = 5.0
    ) -> None:
        """on_error: called in the thread with what a job raised; later jobs are run as usual."""
        self._jobs: queue.PriorityQueue[tuple[int, int, Job | None]] = queue.PriorityQueue()
        """(class, number, job): the lowest is next."""
        self._numbers = itertools.count()
        self._on_error = on_error
        self._close_timeout_s = close_timeout_s
        # A daemon: a device that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, *, is_urgent: bool = False) -> None:
        self._put(0 if is_urgent else 1, job)

    def close(self, last: Job) -> None:
        self._put(2, last)
        self._put(3, None)
        self._thread.join(self._close_timeout_s)

    def _put(self, rank: int, job: Job | None) -> None:
        self._jobs.put((rank, next(self._numbers), job))

    def _run(self) -> None:
        while job := self._jobs.get()[2]:
            try:
                job()
            except Exception as error:  # noqa: BLE001, a thread that ended would be waited for
                self._on_error(error)
