"""Time limits of a request: its deadline, and how long its client may take for a piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.errors import BatonError, ClientStalled


@asynccontextmanager
async def fail_at(when_s: float, error: Callable[[], BatonError]) -> AsyncIterator[None]:
    """Cancel the body at `when_s` on the event loop's clock, and raise `error()`; other timeouts
    pass untouched."""
    scope = asyncio.timeout_at(when_s)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise error() from None


class StallDetector:
    """Of one request, whose pieces are written one at a time: `on_write`, then `on_written`.

    One timer that ticks again and again: one for each piece would cost as much as all else that the
    gateway does about it.
    """

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: longest time from `on_write` to `on_written`."""
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None

    def on_write(self) -> None:
        self._began_s = self._loop.time()

    def on_written(self) -> None:
        self._began_s = None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Cancel the body, and raise ClientStalled, at the moment that a piece takes too long."""
        scope = asyncio.timeout(None)
        timer: asyncio.TimerHandle | None = None

        def tick() -> None:
            nonlocal timer
            now_s = self._loop.time()
            due_s = (now_s if self._began_s is None else self._began_s) + self._timeout_s
            if due_s <= now_s:
                scope.reschedule(now_s)
            else:
                timer = self._loop.call_at(due_s, tick)

        try:
            async with scope:
                tick()
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
