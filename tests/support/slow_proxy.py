"""A TCP proxy of a test's own, which keeps every byte back for as long as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class SlowProxy:
    """Between its own port and another's. `delay_s` may change at any time: it counts when a piece comes."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        self.delay_s = 0.0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError):
                far = await asyncio.open_connection("127.0.0.1", self._target_port)
                try:
                    await asyncio.gather(self._pass(reader, far[1]), self._pass(far[0], writer))
                finally:
                    far[1].close()
        finally:
            writer.close()
            self._connections.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SlowProxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            connections = tuple(self._connections)
            for task in connections:
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)
            await server.wait_closed()
