"""What happened to one sequence in one place, in order, for the one coroutine that serves it."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

EventT = TypeVar("EventT")


class Inbox(Generic[EventT]):
    """Unbounded, because what goes in is: a sequence has max_tokens. One reader, one wake-up for all that is there."""

    def __init__(self) -> None:
        self._events: list[EventT] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: EventT) -> None:
        """Add an event. Called in the event loop."""
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take_all(self) -> list[EventT]:
        """All events that are there, at least one, oldest first."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events
