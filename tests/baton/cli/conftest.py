"""The `baton` command with a client that answers from memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
from typer.testing import CliRunner

import baton.client
from baton.cli.main import app
from baton.client import ChatMessage, Chunk, Completion, Model, SamplingParams, Timing, Usage
from baton.client.results import completion_of
from baton.types import FinishReason

USAGE = Usage(prompt_tokens=3, completion_tokens=2)
TIMING = Timing(
    prefill_ms=7.0,
    decode_ms=5.0,
    total_ms=20.0,
    time_to_first_token_ms=9.0,
    transfer_bytes=2048,
    prefill_worker="prefill-0",
    decode_worker="decode-0",
)

ANSWER: tuple[Chunk, ...] = (
    Chunk(token_index=0, token_ids=(5,), text="Hel", request_id="r1"),
    Chunk(
        token_index=1,
        token_ids=(6,),
        text="lo",
        finish_reason=FinishReason.STOP,
        usage=USAGE,
        timing=TIMING,
        request_id="r1",
    ),
)


class FakeStream:
    """Yields chunks; raises what is no chunk."""

    request_id = "r1"

    def __init__(self, script: tuple[Chunk | BaseException, ...]) -> None:
        self._script = script
        self.is_closed = False

    def __iter__(self) -> Iterator[Chunk]:
        for item in self._script:
            if isinstance(item, BaseException):
                raise item
            yield item

    def collect(self) -> Completion:
        return completion_of(self.request_id, list(self))

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FakeClient:
    """A client with answers that the test writes; records the requests."""

    def __init__(self) -> None:
        self.address = ""
        self.asked: list[tuple[object, SamplingParams]] = []
        self.streams: list[FakeStream] = []
        self.script: tuple[Chunk | BaseException, ...] = ANSWER
        self.served: tuple[Model, ...] = ()
        self.fault: BaseException | None = None

    def __call__(self, address: str, **_: object) -> Self:
        self.address = address
        return self

    def stream(self, prompt: object, params: SamplingParams, **_: object) -> FakeStream:
        if self.fault:
            raise self.fault
        self.asked.append((prompt, params))
        self.streams.append(FakeStream(self.script))
        return self.streams[-1]

    def models(self) -> tuple[Model, ...]:
        if self.fault:
            raise self.fault
        return self.served

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(baton.client, "Client", fake)
    return fake


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs `baton ARGUMENTS` with text on stdin."""

    def invoke(*arguments: str, stdin: str = "") -> Any:
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return invoke


@pytest.fixture
def conversation() -> Callable[..., list[ChatMessage]]:
    """Messages from alternating user and assistant texts."""

    def build(*texts: str) -> list[ChatMessage]:
        roles = ("user", "assistant")
        return [ChatMessage(roles[index % 2], text) for index, text in enumerate(texts)]

    return build
