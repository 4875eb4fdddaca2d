"""The worker's last known load, and who waits for a newer one. Belongs to one asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter

from baton.types import WorkerLoad

#: What gateways place work by. A decode step that only adds tokens is no news.
_placing = attrgetter(
    "num_running", "num_waiting", "num_open_tickets", "is_draining", "role", "num_pending_tokens"
)


class LoadBoard:
    """Holds the load that the engine loop published last."""

    def __init__(self) -> None:
        self.load = WorkerLoad()
        self._changed = asyncio.Event()

    def publish(self, load: WorkerLoad) -> None:
        is_news = _placing(self.load) != _placing(load)
        self.load = load
        if is_news:
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait_for_news(self, timeout_s: float) -> None:
        """Return when work might be placed differently by the load, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def wait_until(self, holds: Callable[[WorkerLoad], bool]) -> None:
        """Return when `holds` of the load."""
        while not holds(self.load):
            await self._changed.wait()


def is_empty(load: WorkerLoad) -> bool:
    """Whether a draining worker may go."""
    return load.num_running == load.num_waiting == load.num_open_tickets == 0
