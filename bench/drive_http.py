"""Open-loop load by the gateway's HTTP API: streamed completions, each over a connection of its
own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from bench.drive import drive_each
from bench.measure import Record
from bench.workload import LoadRequest

#: Reasons of records.
_BROKEN, _TIMEOUT = "BROKEN", "TIMEOUT"


async def drive_http(
    address: str, requests: Sequence[LoadRequest], cache_salt: str, timeout_s: float = 300.0
) -> tuple[Record, ...]:
    """Send all requests, each at its time; returns their records in the same order, including
    failures. address: of the HTTP API. cache_salt: loads with different salts share no cached
    prefix. timeout_s: until a client leaves."""

    async def ask(request: LoadRequest, now: Callable[[], float]) -> Record:
        pieces: list[tuple[float, int]] = []
        sent_s, error = now(), ""
        try:
            async with asyncio.timeout(timeout_s):
                async for event in _events(address, _body_of(request, cache_salt)):
                    pieces += _pieces_of(event, now())
        except TimeoutError:
            error = _TIMEOUT
        except (OSError, EOFError, ValueError, LookupError):
            error = _BROKEN
        num_prompt = len(request.prompt_token_ids)
        return Record(request.due_s, sent_s, now(), num_prompt, tuple(pieces), error)

    return await drive_each(requests, ask)


def _pieces_of(event: Any, at_s: float) -> list[tuple[float, int]]:
    """One piece for an event with tokens, else none."""
    num_tokens = len(event["choices"][0].get("token_ids") or ())
    return [(at_s, num_tokens)] if num_tokens else []


def _body_of(request: LoadRequest, cache_salt: str) -> dict[str, Any]:
    return {
        "prompt": request.prompt_token_ids,
        "max_tokens": request.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": cache_salt,
    }


async def _events(address: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    """Events of one answer up to its end. Raises OSError, EOFError, ValueError for anything else
    than a whole stream."""
    data = json.dumps(body).encode()
    # HTTP/1.0: the answer is not in chunks, and ends with its connection.
    head = f"POST /v1/completions HTTP/1.0\r\nhost: bench\r\ncontent-length: {len(data)}\r\n\r\n"
    async with _connected(address) as (reader, writer):
        writer.write(head.encode() + data)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer.split(b"\r\n")[0]:
            raise ValueError(f"refused: {answer!r}")
        while line := await reader.readline():
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    raise EOFError("the stream broke")


@asynccontextmanager
async def _connected(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
