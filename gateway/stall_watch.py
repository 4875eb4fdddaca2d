"""Ends a request whose client does not take a piece. One timer that looks again and again: one for each piece would cost
as much as all else that the gateway does about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.errors import ClientStalled


class StallWatch:
    """Of one request, whose pieces are written one at a time: `began`, then `ended`."""

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: longest time from `began` to `ended`."""
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None

    def began(self) -> None:
        self._began_s = self._loop.time()

    def ended(self) -> None:
        self._began_s = None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Cancel the body, and raise ClientStalled, at the moment that a piece takes too long."""
        scope = asyncio.timeout(None)
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            now_s = self._loop.time()
            due_s = (now_s if self._began_s is None else self._began_s) + self._timeout_s
            if due_s <= now_s:
                scope.reschedule(now_s)
            else:
                timer = self._loop.call_at(due_s, look)

        try:
            async with scope:
                look()
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._stalled() from None
        finally:
            if timer is not None:
                timer.cancel()

    def _stalled(self) -> ClientStalled:
        return ClientStalled(f"a chunk was not taken within {self._timeout_s:g} s; read faster")
