"""An HTTP server that answers as it is told, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """heads: of the requests; bodies: their JSON, in the same order."""

    address: str
    heads: list[bytes] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)


@asynccontextmanager
async def answering(answer_of: Callable[[int], bytes]) -> AsyncIterator[Asked]:
    """answer_of: the bytes to send, given the number of the request, from 0; then the connection
    ends."""
    asked = Asked("")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        number = len(asked.heads)
        asked.heads.append(head)
        asked.bodies.append(body)
        writer.write(answer_of(number))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        asked.address = f"{host}:{port}"
        yield asked
