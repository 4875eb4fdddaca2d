"""Keeps as many workers as the planner wants."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

logger = logging.getLogger(__name__)


class Scaling:
    """Starts workers that are missing, all at once, and lets those that are too many go, the last
    ones first. One that goes is neither counted nor started anew before it has ended."""

    def __init__(
        self,
        names: Sequence[str],
        present: Iterable[str],
        start: Callable[[str], None],
        stop: Callable[[str], Awaitable[None]],
    ) -> None:
        """names: of all workers that there may be. present: of those that were started.
        start: begins to start a worker, and to restart it whenever it ends.
        stop: ends that, drains the worker, and returns once its process has ended."""
        self._names = names
        self._present = set(present)
        self._start = start
        self._stop = stop
        self._number = len(self._present)
        self._changed = asyncio.Event()
        self._leaving: dict[str, asyncio.Task[None]] = {}

    def want(self, number: int) -> None:
        """Set the number of workers; at least one is kept."""
        self._number = min(max(1, number), len(self._names))
        self._changed.set()

    async def run(self) -> None:
        """Start and stop workers until cancelled; then those that go are left as they are."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                self._apply()
        finally:
            for task in self._leaving.values():
                task.cancel()
            await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    def _apply(self) -> None:
        present = [name for name in self._names if name in self._present]
        free = [n for n in self._names if n not in self._present and n not in self._leaving]
        for name in free[: max(0, self._number - len(present))]:
            logger.info("starting %s: %d workers are wanted", name, self._number)
            self._present.add(name)
            self._start(name)
        for name in present[self._number :]:
            logger.info("draining %s: %d workers are wanted", name, self._number)
            self._present.remove(name)
            self._leaving[name] = asyncio.create_task(self._leave(name), name=f"leave {name}")

    async def _leave(self, name: str) -> None:
        try:
            await self._stop(name)
        finally:
            del self._leaving[name]
            self._changed.set()
