"""A gateway that reports long turns of its event loop.

Replaces `gateway`, with its options. Prints `PREFIX` and milliseconds each time the loop's thread
computed that long before it resumed a task that sleeps for a millisecond. The unit is CPU time,
which hardly depends on other load.
"""

from __future__ import annotations

import asyncio
import time

from baton.config import GatewayOptions
from baton.service import OnReady, main
from gateway.server import serve_gateway

PREFIX = "long turn, ms: "

_LONG_MS = 5.0


async def _watch() -> None:
    last_s = time.thread_time()
    while True:
        await asyncio.sleep(0.001)
        now_s = time.thread_time()
        turn_ms = (now_s - last_s) * 1e3
        if turn_ms >= _LONG_MS:
            print(f"{PREFIX}{turn_ms:.1f}", flush=True)
        last_s = now_s


async def serve(options: GatewayOptions, stop: asyncio.Event, on_ready: OnReady) -> None:
    """The gateway."""
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_watch())
        await serve_gateway(options, stop, on_ready)
        watching.cancel()


if __name__ == "__main__":
    main(GatewayOptions, serve, "gateway")
