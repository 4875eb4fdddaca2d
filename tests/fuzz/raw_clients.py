"""Clients that cost little, for many malformed calls: bytes of HTTP/2 and of HTTP/1.1, without a
library between."""

from __future__ import annotations

import asyncio
import re
import struct

import grpc

from tests.support.http2 import (
    ACK,
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    header_block,
)

_HEADER_BYTES = 9
_FIRST_WINDOW, _LARGEST_WINDOW = 65_535, 2**31 - 1

#: Settings: the answers' headers are to be literal, and may be of any length.
_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4

#: A literal, without Huffman's code, as grpc writes it.
_STATUS = re.compile(rb"\x0bgrpc-status[\x01\x02](\d{1,2})")

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")

_NAMES = {str(code.value[0]).encode(): code.name for code in grpc.StatusCode}

#: How a call ended that has no status: the first piece of its answer was enough; the server reset
#: it; it ended without any.
ANSWERED, RESET, NO_STATUS = "answered", "reset", "no status"


class GrpcConnection(asyncio.Protocol):
    """Calls at once over one connection; see `call`. What a stream answers is not kept."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._calls: dict[int, asyncio.Future[str]] = {}
        self._whole: set[int] = set()
        self._next_stream = 1
        self._window = _FIRST_WINDOW
        self._has_window = asyncio.Event()
        self.is_open = True

    async def call(self, path: str, messages: bytes, *, is_whole: bool, timeout_s: int) -> str:
        """The name of the status that a call with these messages ended with, each behind its
        length.

        is_whole: read until the end, and not only the first piece of an answer. timeout_s: which
        the server is to keep. Raises ConnectionError if the connection broke.
        """
        while len(messages) > self._window and self.is_open:
            self._has_window.clear()
            await self._has_window.wait()
        if self._transport is None or not self.is_open:
            raise ConnectionResetError
        self._window -= len(messages)
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls[stream] = ended
        if is_whole:
            self._whole.add(stream)
        self._transport.write(
            frame(
                HEADERS,
                END_HEADERS,
                stream,
                header_block(path, **{"grpc-timeout": f"{timeout_s}S"}),
            )
            + frame(DATA, END_STREAM, stream, messages)
        )
        return await ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack(">HIHI", _TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
        more = struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW)
        transport.write(
            PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._has_window.set()
        calls, self._calls = self._calls, {}
        for ended in calls.values():
            if not ended.done():
                ended.set_exception(exc or ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        begin = 0
        while len(self._buffer) >= begin + _HEADER_BYTES:
            size = int.from_bytes(self._buffer[begin : begin + 3], "big")
            end = begin + _HEADER_BYTES + size
            if len(self._buffer) < end:
                break
            kind, flags = self._buffer[begin + 3], self._buffer[begin + 4]
            stream = int.from_bytes(self._buffer[begin + 5 : begin + 9], "big")
            self._take(kind, flags, stream, bytes(self._buffer[begin + _HEADER_BYTES : end]))
            begin = end
        del self._buffer[:begin]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        assert self._transport is not None
        if kind == HEADERS and flags & END_STREAM:
            found = _STATUS.search(payload)
            self._end(stream, _NAMES[found[1]] if found else NO_STATUS)
        elif kind == RST_STREAM:
            self._end(stream, RESET)
        elif kind == DATA and stream not in self._whole:
            if self._end(stream, ANSWERED):
                self._transport.write(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self._transport.write(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
            self._has_window.set()
        elif kind == GOAWAY:
            self._transport.close()

    def _end(self, stream: int, status: str) -> bool:
        """Whether it had not ended before."""
        self._whole.discard(stream)
        ended = self._calls.pop(stream, None)
        if ended is None:
            return False
        if not ended.done():
            ended.set_result(status)
        return True


def grpc_frame(message: bytes) -> bytes:
    """A message as a call carries it."""
    return b"\0" + struct.pack(">I", len(message)) + message


class HttpConnection:
    """POSTs one after the other over one connection, which is opened anew after it was closed."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, request: bytes, *, is_last: bool) -> bytes:
        """The first line of the answer to this request, all of which is read; empty if there is
        none. is_last: no more follows, whatever the request says.

        Raises OSError if the connection broke, and asyncio.IncompleteReadError.
        """
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        self._writer.write(request)
        if is_last:
            self._writer.write_eof()
            return await self._reader.readline()
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if length is None:  # a stream: its end is not waited for
            self.close()
        else:
            await self._reader.readexactly(int(length[1]))
        return head.partition(b"\r\n")[0]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None
