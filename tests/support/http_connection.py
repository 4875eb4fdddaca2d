"""A connection to an HTTP server, for tests of what no client library sends."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any


class Connection:
    """Kept alive over many requests, as far as the server lets it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> Answer:
        if self._streams is None:
            host, _, port = self._address.rpartition(":")
            self._streams = await asyncio.open_connection(host, int(port))
        reader, writer = self._streams
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answered = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if "content-length: " not in answered:
            assert "text/event-stream" in answered
            self.close()
            return Answer(200, None)
        length = int(answered.partition("content-length: ")[2].partition("\r\n")[0])
        text = await reader.readexactly(length)
        if "connection: close" in answered:
            self.close()
        return Answer(int(answered.split(" ")[1]), json.loads(text))

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None
