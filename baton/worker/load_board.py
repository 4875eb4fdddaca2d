"""The worker's last known load, and who wants to hear of it. Belongs to one asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from baton.types import WorkerLoad


class LoadBoard:
    """Holds the load that the engine loop published last."""

    def __init__(self) -> None:
        self._load = WorkerLoad()
        self._changed = asyncio.Event()

    @property
    def load(self) -> WorkerLoad:
        return self._load

    def publish(self, load: WorkerLoad) -> None:
        is_news = is_worth_telling(self._load, load)
        self._load = load
        if is_news:
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait_for_news(self, timeout_s: float) -> None:
        """Return when there is a load worth telling, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def wait_until(self, holds: Callable[[WorkerLoad], bool]) -> None:
        """Return when `holds` of the load."""
        while not holds(self._load):
            await self._changed.wait()


def is_worth_telling(old: WorkerLoad, new: WorkerLoad) -> bool:
    """Whether a gateway might place work differently now. A decode step that only adds tokens is no
    news."""
    return (
        old.num_running != new.num_running
        or old.num_waiting != new.num_waiting
        or old.num_open_tickets != new.num_open_tickets
        or old.is_draining != new.is_draining
        or old.role != new.role
        or old.num_pending_tokens != new.num_pending_tokens
    )


def is_empty(load: WorkerLoad) -> bool:
    """Whether a draining worker may go."""
    return load.num_running == load.num_waiting == load.num_open_tickets == 0
