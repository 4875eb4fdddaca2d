"""Streams by server-sent events go on where they broke off, each piece once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.check import doors
from baton.check.doors import SseDoor
from baton.check.requests import CheckRequest
from baton.check.stream_history import StreamHistory
from baton.client import BeamSearch, SamplingParams, StructuredOutput
from baton.errors import InvalidRequest, WorkerLost

RIGHT = (tuple(range(5, 15)), tuple(range(20, 30)))
PARAMS = SamplingParams(n=2, max_tokens=10, seed=3, logprobs=2, prompt_logprobs=1)
REQUEST = CheckRequest((1, 2, 3), PARAMS)


class Gateway:
    """Answers with RIGHT, and breaks off within an event after `num_whole` events of each
    connection. It understands both ways to go on."""

    def __init__(self, num_whole: int, status: str = "200 OK") -> None:
        self.num_whole = num_whole
        self.statuses = [status]
        self.bodies: list[dict[str, Any]] = []
        self.address = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SseDoor]:
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            self.address = f"{host}:{port}"
            yield SseDoor(lambda: self.address, by_event_id=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = json.loads(await reader.readexactly(int(fields["content-length"])))
        self.bodies.append(body)
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        writer.write(f"HTTP/1.0 {status}\r\n\r\n".encode())
        if status.startswith("200"):
            writer.write(self._events(fields.get("last-event-id", ""), body))
        await writer.drain()
        writer.close()

    def _events(self, last_id: str, body: dict[str, Any]) -> bytes:
        at = [int(number) for number in last_id.split(".")] if last_id else [0, 0]
        for each in body.get("resume_from", ()):
            at[each["choice"]] = len(each["token_ids"])
            assert each["num_chars"] == at[each["choice"]]
            assert each["has_ended"] == (at[each["choice"]] == 10)
        events = []
        while min(at) < 10:
            choice = at.index(min(at))
            token = RIGHT[choice][at[choice]]
            at[choice] += 1
            piece = {
                "index": choice,
                "text": "x",
                "token_ids": [token],
                "finish_reason": "length" if at[choice] == 10 else None,
            }
            ids = ".".join(map(str, at))
            events.append(f"data: {json.dumps({'choices': [piece]})}\nid: {ids}\n\n")
        usage = {"prompt_tokens": 3, "completion_tokens": 20}
        events.append(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n")
        text = "".join(events[: self.num_whole])
        if len(events) > self.num_whole:
            text += events[self.num_whole][:-1]
        return text.encode()


async def history_of(door: SseDoor) -> StreamHistory:
    history = StreamHistory(REQUEST)
    async with door.stream(REQUEST) as stream:
        async for chunk in stream:
            history.take(chunk)
    return history


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_RETRY_S", 0.0)


@pytest.mark.parametrize("by_event_id", [False, True])
@pytest.mark.parametrize("num_whole", [1, 7, 99])
async def test_a_stream_that_breaks_goes_on(by_event_id: bool, num_whole: int) -> None:
    gateway = Gateway(num_whole)
    gateway.statuses = ["503 Busy", "200 OK"]
    async with gateway.running():
        door = SseDoor(lambda: gateway.address, by_event_id=by_event_id)
        history = await history_of(door)
    assert not history.verdict(RIGHT, is_whole=True)
    assert len(gateway.bodies) >= 1 + 20 // num_whole


async def test_what_another_attempt_would_get_too_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Gateway(9, "400 Bad").running() as door:
        with pytest.raises(InvalidRequest, match="400 Bad"):
            await history_of(door)
    monkeypatch.setattr(doors, "_GIVE_UP_S", 0.01)
    async with Gateway(9, "503 Busy").running() as door:
        with pytest.raises(WorkerLost, match="no progress"):
            await history_of(door)


async def test_silence_ends_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a host that is gone, from which nothing comes, not even an end."""
    monkeypatch.setattr(doors, "_GIVE_UP_S", 0.01)
    is_over = asyncio.Event()

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_over.wait()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with asyncio.timeout(10):
            with pytest.raises(WorkerLost, match="no progress"):
                await history_of(SseDoor(lambda: f"{host}:{port}", by_event_id=True))
        is_over.set()


async def test_a_request_is_spelt_as_the_port_takes_it() -> None:
    gateway = Gateway(99)
    schema = {"type": "object"}
    async with gateway.running() as door:
        for output in (
            StructuredOutput(json_schema=schema),
            StructuredOutput(regex="a+"),
            StructuredOutput(choice=["a", "b"]),
        ):
            params = PARAMS.with_options(structured_output=output)
            async with door.stream(CheckRequest((1, 2), params, "adapter")) as stream:
                assert [chunk async for chunk in stream]
    structures = [body["structured_outputs"] for body in gateway.bodies]
    assert structures == [{"json": schema}, {"regex": "a+"}, {"choice": ["a", "b"]}]
    body = gateway.bodies[0]
    assert (body["model"], body["n"], body["seed"], body["logprobs"]) == ("adapter", 2, 3, 2)
    assert "prompt_logprobs" not in body, "a stream has none"
    assert not door.takes(CheckRequest((1,), SamplingParams(beam_search=BeamSearch(2))))
