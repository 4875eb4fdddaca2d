"""Ways to send a request of a check, and to continue its stream after a break: the SDK, and
server-sent events with `Last-Event-ID` or with `resume_from`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict, replace
from typing import Any, Protocol

from baton.check.stream_history import StreamRequest
from baton.client import AsyncClient, FinishReason
from baton.client.results import Chunk, Timing, Usage
from baton.errors import InvalidRequest, WorkerLost

#: Seconds between two attempts, and without progress after which a stream is given up.
_RETRY_S, _GIVE_UP_S = 0.2, 120.0

#: Statuses after which the same request may succeed.
_RETRIABLE = ("429", "500", "503", "504")

#: Fields of SamplingParams that HTTP spells otherwise, or that a stream by HTTP cannot have.
_SPELT_OTHERWISE = ("structured_output", "prompt_logprobs", "beam_search")


class Door(Protocol):
    """One way to send requests."""

    @property
    def name(self) -> str: ...

    def takes(self, request: StreamRequest) -> bool:
        """Whether the request can be sent in this way."""
        ...

    def stream(self, request: StreamRequest) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        """The pieces of the answer, each once, whatever breaks on the way. Raises BatonError."""
        ...


class SdkDoor:
    """By the SDK, which retries and continues by itself."""

    name = "SDK"

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    def takes(self, request: StreamRequest) -> bool:  # noqa: ARG002
        return True

    def stream(self, request: StreamRequest) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        return self._client.stream(request.prompt, request.params, model=request.model)


class SseDoor:
    """Server-sent events of /v1/completions, a connection for each attempt."""

    def __init__(self, address: Callable[[], str], *, by_event_id: bool) -> None:
        """address: of the HTTP port, host:port. by_event_id: continue by Last-Event-ID, not by
        resume_from."""
        self._address = address
        self._by_event_id = by_event_id
        self.name = "SSE, Last-Event-ID" if by_event_id else "SSE, resume_from"

    def takes(self, request: StreamRequest) -> bool:
        return request.params.beam_search is None

    def stream(self, request: StreamRequest) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        return aclosing(self._pieces(request))

    async def _pieces(self, request: StreamRequest) -> AsyncGenerator[Chunk]:
        answer = _Answer(_body_of(request, by_event_id=self._by_event_id))
        give_up_s = time.monotonic() + _GIVE_UP_S
        while not answer.is_whole:
            fault = ""
            try:
                async with aclosing(_events(self._address(), *answer.next_request())) as events:
                    async for event_id, event in events:
                        give_up_s = time.monotonic() + _GIVE_UP_S
                        if (chunk := answer.take(event_id, event)) is not None:
                            yield chunk
            except (OSError, asyncio.IncompleteReadError, _TryAgain) as error:
                fault = str(error)
            if not answer.is_whole:
                if time.monotonic() > give_up_s:
                    raise WorkerLost(f"no progress for {_GIVE_UP_S:g} s: {fault or 'cut off'}")
                await asyncio.sleep(_RETRY_S)


class _TryAgain(Exception):
    """The gateway could not answer now."""


class _Answer:
    """What came of an answer, over all attempts."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.is_whole = False
        self._body = body
        self._so_far: dict[int, dict[str, Any]] = {}
        self._last_id = ""
        self._last: Chunk | None = None
        """Held back: the usage, an event of its own, belongs to the last piece."""
        self._num_attempts = 0

    def next_request(self) -> tuple[str, Mapping[str, Any]]:
        """Last-Event-ID, and the body."""
        self._num_attempts += 1
        if self._body["stream_options"]["include_event_ids"]:
            return self._last_id, self._body
        return "", {**self._body, "resume_from": [*self._so_far.values()]}

    def take(self, event_id: str, event: Mapping[str, Any]) -> Chunk | None:
        """The piece before this one, or the last one with the usage."""
        self._last_id = event_id or self._last_id
        before = self._last
        if not event["choices"]:
            self.is_whole = True
            usage = event["usage"]
            used = Usage(usage["prompt_tokens"], usage["completion_tokens"])
            return replace(before, usage=used) if before else None
        (piece,) = event["choices"]
        nothing = {"choice": piece["index"], "token_ids": [], "num_chars": 0, "has_ended": False}
        choice = self._so_far.setdefault(piece["index"], nothing)
        token_index, reason = len(choice["token_ids"]), piece["finish_reason"]
        choice["token_ids"] += piece["token_ids"]
        choice["num_chars"] += len(piece["text"])
        choice["has_ended"] = reason is not None
        timing = event.get("timing")
        self._last = Chunk(
            token_index,
            tuple(piece["token_ids"]),
            piece["text"],
            finish_reason=FinishReason[reason.upper()] if reason else None,
            timing=Timing(num_resumes=timing["num_resumes"] + self._num_attempts - 1)
            if timing
            else None,
            choice=piece["index"],
        )
        return before


def _body_of(request: StreamRequest, *, by_event_id: bool) -> dict[str, Any]:
    params = request.params
    given = {
        name: value
        for name, value in asdict(params).items()
        if value is not None and name not in _SPELT_OTHERWISE
    }
    if params.structured_output is not None:
        kinds = {k: v for k, v in asdict(params.structured_output).items() if v is not None}
        schema = kinds.pop("json_schema", None)
        given["structured_outputs"] = kinds if schema is None else {"json": schema}
    return {
        "model": request.model or None,
        "prompt": request.prompt,
        "seed": 0,  # resume_from needs one
        **given,
        "stream": True,
        "stream_options": {"include_usage": True, "include_event_ids": by_event_id},
        "return_token_ids": True,
        "return_timing": True,
    }


async def _events(
    address: str, last_id: str, body: Mapping[str, Any]
) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """Ids and data of the events of one connection. Raises OSError, after silence, too, and
    _TryAgain, and InvalidRequest for an answer that another attempt would get, too."""
    data = json.dumps(body).encode()
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_GIVE_UP_S):
        reader, writer = await asyncio.open_connection(host, int(port))

    async def read_line() -> bytes:
        async with asyncio.timeout(_GIVE_UP_S):
            return await reader.readline()

    try:
        resumed = f"last-event-id: {last_id}\r\n" if last_id else ""
        length = f"content-length: {len(data)}\r\n"
        writer.write(f"POST /v1/completions HTTP/1.0\r\n{resumed}{length}\r\n".encode() + data)
        status = (await read_line()).decode()
        if " 200 " not in status:
            async with asyncio.timeout(_GIVE_UP_S):
                text = (await reader.read()).decode(errors="replace").partition("\r\n\r\n")[2]
            if not status or status.split()[1] in _RETRIABLE:
                raise _TryAgain(f"{status.strip()} {text}")
            raise InvalidRequest(f"{status.strip()}: {text}")
        fields: dict[str, str] = {}
        while (line := await read_line()).endswith(b"\n"):
            name, _, value = line.decode().rstrip("\r\n").partition(": ")
            if name:
                fields[name] = value
                continue
            # Only a blank line ends an event: what broke off within one is none.
            if fields.get("data", "").startswith("{"):
                event = json.loads(fields["data"])
                if "error" in event:
                    raise _TryAgain(fields["data"])
                yield fields.get("id", ""), event
            fields = {}
    finally:
        writer.close()
