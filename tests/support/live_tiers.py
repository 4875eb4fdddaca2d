"""Real worker services in this process: real gRPC, real sockets, oracle engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from baton.config import DecodeOptions, PrefillOptions
from baton.service import ReadyReport
from decode_svc.server import serve_decode
from prefill_svc.server import serve_prefill


@asynccontextmanager
async def serving(
    serve: Callable[[Any, asyncio.Event, Callable[[ReadyReport], None]], Awaitable[None]],
    options: object,
) -> AsyncIterator[str]:
    """Run a service; yields its address, and stops it in order at the end."""
    stop = asyncio.Event()
    ready: asyncio.Future[ReadyReport] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(serve(options, stop, ready.set_result))
    try:
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield ready.result().address
    finally:
        stop.set()
        await task


def decode_worker(**options: Any) -> Any:
    """A decode worker on an oracle engine; drains for 1 s at most."""
    defaults = {"model": "oracle", "engine": "oracle", "drain_timeout_s": 1.0, "block_size": 4}
    return serving(serve_decode, DecodeOptions(**{**defaults, **options}))


def prefill_worker(**options: Any) -> Any:
    """A prefill worker on an oracle engine; drains for 1 s at most."""
    defaults = {"model": "oracle", "engine": "oracle", "drain_timeout_s": 1.0, "block_size": 8}
    return serving(serve_prefill, PrefillOptions(**{**defaults, **options}))
