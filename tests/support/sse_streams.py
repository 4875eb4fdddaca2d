"""Streams by HTTP, read as a client of server-sent events does that takes up what broke off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from baton.client import Chunk, FinishReason
from baton.client.results import Usage
from bench.oracle_requests import OracleRequest
from tests.support.fault_streams import Source

_RETRY_DELAY_S = 0.05


def by_sse(address: Callable[[], str]) -> Source:
    """address: of the gateway that runs now. A stream whose connection breaks, or that no gateway
    answers, is asked for again with what came of it."""

    async def pieces(request: OracleRequest) -> AsyncGenerator[Chunk]:
        so_far: dict[int, dict[str, Any]] = {}
        last: Chunk | None = None
        while True:
            try:
                async for chunk in _answer(address(), request, so_far):
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


async def _answer(
    address: str, request: OracleRequest, so_far: dict[int, dict[str, Any]]
) -> AsyncIterator[Chunk]:
    """What comes on one connection, behind what came before; its end is that of the connection."""
    asked = {
        "prompt": request.prompt,
        "temperature": request.temperature,
        "seed": request.seed,
        "max_tokens": request.num_tokens,
        "n": request.num_choices,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "resume_from": list(so_far.values()),
    }
    body = json.dumps(asked).encode()
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST /v1/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 503 " in status:
            return  # no workers yet
        assert b" 200 " in status, status + await reader.read()
        while (line := await reader.readline()).endswith(b"\n"):
            if line.startswith(b"data: {"):
                yield _chunk(json.loads(line.removeprefix(b"data: ")), so_far)
    finally:
        writer.close()


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
