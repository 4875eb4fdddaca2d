"""A time limit that ends in an error of ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.errors import BatonError


@asynccontextmanager
async def fail_at(when_s: float, error: Callable[[], BatonError]) -> AsyncIterator[None]:
    """Cancel the body at `when_s` on the event loop's clock, and raise `error()`; other timeouts pass untouched."""
    scope = asyncio.timeout_at(when_s)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise error() from None
