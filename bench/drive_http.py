"""Open-loop load by the gateway's HTTP API: streamed completions, each over a connection of its
own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from baton.errors import DeadlineExceeded, Overloaded
from bench.drive import drive_each
from bench.measure import Record
from bench.workload import LoadRequest
from gateway.http.generation import TIMEOUT_MS

#: Reasons of records, beside those of errors.
_BROKEN, _TIMEOUT = "BROKEN", "TIMEOUT"
#: Type of an error event, as of status 408.
_TIMEOUT_TYPE = "timeout_error"


class Refused(ValueError):
    """Status 429 with Retry-After."""


class TooLate(ValueError):
    """The server ended the answer at its deadline: status 408, or an error event of that type."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server is asked for a stream of tokens. body_of: given a request and a salt; loads with
    different salts share no cached prefix. num_tokens: of an event; raises LookupError for one that
    is none of an answer. is_last: whether the answer is whole with this event; None for [DONE]."""

    path: str
    body_of: Callable[[LoadRequest, str], dict[str, Any]]
    num_tokens: Callable[[Any], int]
    is_last: Callable[[Any], bool]


def _completion(request: LoadRequest, cache_salt: str) -> dict[str, Any]:
    return {
        "prompt": request.prompt_token_ids,
        "max_tokens": request.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": cache_salt,
    }


#: As Baton and vLLM answer.
COMPLETIONS = Dialect(
    "/v1/completions",
    _completion,
    num_tokens=lambda event: len(event["choices"][0].get("token_ids") or ()),
    is_last=lambda event: event is None,
)


async def drive_http(
    address: str,
    requests: Sequence[LoadRequest],
    cache_salt: str,
    dialect: Dialect = COMPLETIONS,
    timeout_s: float = 300.0,
    deadline_s: float | None = None,
) -> tuple[Record, ...]:
    """Send all requests, each at its time; returns their records in the same order, including
    failures. address: of the HTTP API. timeout_s: until a client leaves. deadline_s: that a gateway
    is told; None: its own."""
    more = "" if deadline_s is None else f"{TIMEOUT_MS}: {round(deadline_s * 1e3)}\r\n"

    async def ask(request: LoadRequest, now: Callable[[], float]) -> Record:
        pieces: list[tuple[float, int]] = []
        sent_s, error = now(), ""
        try:
            async with asyncio.timeout(timeout_s):
                body = dialect.body_of(request, cache_salt)
                async for event in _events(address, dialect, body, more):
                    num_tokens = dialect.num_tokens(event)
                    pieces += [(now(), num_tokens)] if num_tokens else []
        except TimeoutError:
            error = _TIMEOUT
        except Refused:
            error = Overloaded.reason
        except TooLate:
            error = DeadlineExceeded.reason
        except (OSError, EOFError, ValueError, LookupError):
            error = _BROKEN
        num_prompt = len(request.prompt_token_ids)
        return Record(request.due_s, sent_s, now(), num_prompt, tuple(pieces), error)

    return await drive_each(requests, ask)


async def _events(
    address: str, dialect: Dialect, body: dict[str, Any], more: str
) -> AsyncIterator[Any]:
    """Events of one answer up to its end. more: headers. Raises OSError, EOFError, ValueError for
    anything else than a whole stream; Refused for a refusal; TooLate."""
    data = json.dumps(body).encode()
    # HTTP/1.0, so that the answer ends with its connection. Servers that send chunks nevertheless
    # put whole events into each: lines between them are none of an event.
    head = (
        f"POST {dialect.path} HTTP/1.0\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n{more}\r\n"
    )
    async with _connected(address) as (reader, writer):
        writer.write(head.encode() + data)
        answer = await reader.readuntil(b"\r\n\r\n")
        status = answer.split(b"\r\n")[0]
        if b" 429 " in status and b"\r\nretry-after: " in answer.lower():
            raise Refused
        if b" 408 " in status:
            raise TooLate
        if b" 200 " not in status:
            raise ValueError(f"refused: {answer!r}")
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            event = None if line == b"data: [DONE]\n" else json.loads(line[6:])
            if _is_too_late(event):
                raise TooLate
            if event is not None:
                yield event
            if dialect.is_last(event):
                return
    raise EOFError("the stream broke")


def _is_too_late(event: Any) -> bool:
    error = event.get("error") if isinstance(event, dict) else None
    return isinstance(error, dict) and error.get("type") == _TIMEOUT_TYPE


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
