"""Streams by HTTP, read as a client of server-sent events does that takes up what broke off:
completions as the history of a stream, and chats in any of the APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from baton.client import Chunk, FinishReason
from baton.client.results import Usage
from bench.oracle_requests import OracleRequest
from tests.support.broken_streams import so_far_of
from tests.support.fault_streams import Source

_RETRY_DELAY_S = 0.05

#: Types of events that end an answer.
_LAST = frozenset({"response.completed", "response.incomplete", "message_stop"})

_Lines = AsyncGenerator[bytes]


def by_sse(address: Callable[[], str], *, by_event_id: bool = False) -> Source:
    """address: of the current gateway. A stream with a broken connection, or without an answer, is
    requested again with the tokens received, or by_event_id: with the id of the last event."""

    async def pieces(request: OracleRequest) -> AsyncGenerator[Chunk]:
        client = _Client(address, request, by_event_id=by_event_id)
        last: Chunk | None = None
        while True:
            try:
                async for chunk in client.answer():
                    if chunk.usage is not None and last is not None:
                        # An event of its own there, and of the last piece here.
                        yield replace(last, usage=chunk.usage)
                        return
                    if last is not None:
                        yield last
                    last = chunk
            except OSError:
                pass
            await asyncio.sleep(_RETRY_DELAY_S)

    return pieces


class _Client:
    """Client of one stream."""

    def __init__(
        self, address: Callable[[], str], request: OracleRequest, *, by_event_id: bool
    ) -> None:
        self._address = address
        self._by_event_id = by_event_id
        self._asked = {
            "prompt": request.prompt,
            "temperature": request.temperature,
            "seed": request.seed,
            "max_tokens": request.num_tokens,
            "n": request.num_choices,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "include_event_ids": by_event_id},
            "return_token_ids": True,
        }
        self._so_far: dict[int, dict[str, Any]] = {}
        self._last_id = ""

    async def answer(self) -> AsyncIterator[Chunk]:
        """What comes on one connection, behind what came before; its end is that of the
        connection."""
        asked, head = self._asked, ""
        if not self._by_event_id:
            asked = {**asked, "resume_from": list(self._so_far.values())}
        elif self._last_id:
            head = f"Last-Event-ID: {self._last_id}\r\n"
        event: dict[str, str] = {}
        async for line in _lines(self._address(), "/v1/completions", asked, head):
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                event[name] = value
                continue
            # An event that its connection broke off in is none.
            self._last_id = event.get("id", self._last_id)
            if event.get("data", "").startswith("{"):
                yield _chunk(json.loads(event["data"]), self._so_far)
            event = {}


async def _lines(address: str, path: str, asked: dict[str, Any], head: str = "") -> _Lines:
    """What comes on one connection, line by line up to its end; nothing while there are no
    workers."""
    body = json.dumps(asked).encode()
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        start = f"POST {path} HTTP/1.0\r\n{head}content-length: {len(body)}\r\n\r\n"
        writer.write(start.encode() + body)
        status = await reader.readline()
        if b" 503 " in status:
            return
        assert b" 200 " in status, status + await reader.read()
        while (line := await reader.readline()).endswith(b"\n"):
            yield line
    finally:
        writer.close()


class ChatStream:
    """An answer of one of the chat APIs, up to its end, however many gateways it takes. asked: with
    a seed. All its parts go on under the name of the first."""

    def __init__(self, address: Callable[[], str], path: str, asked: dict[str, Any]) -> None:
        self._address = address
        self._path = path
        self._asked = {**asked, "stream": True, "return_token_ids": True}
        self.request_id = ""
        """Id of the first part, once it has begun."""
        self.events: list[Any] = []
        """That came, and are not to come again."""
        self.num_parts = 0
        self.has_begun = asyncio.Event()
        """Set when there are tokens."""
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not await self._part():
            await asyncio.sleep(_RETRY_DELAY_S)

    async def _part(self) -> bool:
        """What comes on one connection. Whether the answer has ended with it."""
        so_far = so_far_of(self.events)
        asked = {**self._asked, **({"resume_from": [so_far]} if so_far["token_ids"] else {})}
        head = f"x-request-id: {self.request_id}\r\n" if self.request_id else ""
        later: list[Any] = []
        """What came behind the last tokens."""
        with suppress(OSError):
            async for line in _lines(self._address(), self._path, asked, head):
                if line.startswith(b"x-request-id: "):
                    self.num_parts += 1
                    self.request_id = self.request_id or line.decode().split()[1]
                if line == b"data: [DONE]\n":
                    return True
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                later.append(event)
                if event.get("type") in _LAST:
                    self.events += later
                    return True
                if so_far_of([event])["token_ids"]:
                    self.events += later
                    later = []
                    self.has_begun.set()
        return False


def _chunk(event: dict[str, Any], so_far: dict[int, dict[str, Any]]) -> Chunk:
    assert "error" not in event, event
    if not event["choices"]:
        usage = event["usage"]
        used = Usage(usage["prompt_tokens"], usage["completion_tokens"])
        return Chunk(0, usage=used)
    (piece,) = event["choices"]
    index = piece["index"]
    nothing = {"choice": index, "token_ids": [], "num_chars": 0, "has_ended": False}
    choice = so_far.setdefault(index, nothing)
    token_index = len(choice["token_ids"])
    choice["token_ids"] += piece["token_ids"]
    choice["num_chars"] += len(piece["text"])
    choice["has_ended"] = piece["finish_reason"] is not None
    finish = FinishReason[piece["finish_reason"].upper()] if piece["finish_reason"] else None
    return Chunk(token_index, tuple(piece["token_ids"]), piece["text"], (), finish, choice=index)
