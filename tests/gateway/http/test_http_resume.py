"""Streams of chats that are taken up where they broke off: what came, and what comes then, are one
stream, calls, thoughts and their names among it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.types import Sampling
from baton.v1 import inference_pb2
from gateway.chat.style import chat_style
from gateway.http.chat import ChatBody, ChatFormat
from gateway.http.format import Answer, Format
from gateway.http.messages import MessagesBody, MessagesFormat
from gateway.http.requests import ModelBody
from gateway.http.responses import ResponsesBody, ResponsesFormat
from tests.support.broken_streams import documents, merged, so_far_of
from tests.support.http_bodies import parsed

STYLE = chat_style("<tool_call> </think>", "auto", "auto")
ANSWER = Answer("id-1", 7, "m", "fp", Sampling())
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 9,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 0},
}
TALK = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object"}
OPTIONS: dict[str, Any] = {"stream": True, "return_token_ids": True, "seed": 5}

BODIES: dict[str, tuple[type[ModelBody], Any, dict[str, Any]]] = {
    "chat": (
        ChatBody,
        ChatFormat,
        {
            "messages": TALK,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        },
    ),
    "responses": (
        ResponsesBody,
        ResponsesFormat,
        {
            "input": "x",
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "enable_response_messages": True,
        },
    ),
    "messages": (
        MessagesBody,
        MessagesFormat,
        {
            "messages": TALK,
            "max_tokens": 99,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
        },
    ),
}

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'
TEXTS = st.lists(
    st.sampled_from([CALL, "<think>", "</think>", "<tool", "\n", " ", "so ", "x", "{}", "<"]),
    max_size=8,
).map("".join)


def form_of(kind: str, **fields: Any) -> Format:
    cls, make, body = BODIES[kind]
    data = json.dumps({**body, **OPTIONS, **fields}).encode()
    made: Format = make(parsed(cls, data), lambda token: chr(token).encode(), STYLE)
    made.begin(0, ANSWER, [1, 2, 3])
    return made


def chunks_of(
    text: str, cuts: Sequence[int], start: int = 0
) -> Iterator[inference_pb2.GenerateResponse]:
    """A token for each character, in pieces; the first piece of a stream resumed after `start` of
    them has all their text, as gateway.output.ChoiceOutput gives it."""
    end, number = start, 0
    while end < len(text):
        begin, end = end, min(len(text), end + cuts[number % len(cuts)])
        number += 1
        piece = inference_pb2.GenerateResponse(
            token_ids=map(ord, text[begin:end]), text=text[0 if begin == start else begin : end]
        )
        if end == len(text):
            piece.finish_reason = 1  # stop
        yield piece


def events_of(
    form: Format, chunks: Iterator[inference_pb2.GenerateResponse]
) -> Iterator[list[Any]]:
    """Those of each piece, and of the end."""
    for chunk in chunks:
        yield documents(form.event(0, chunk, "", ""))
    yield documents(form.end(USAGE, {}))


@pytest.mark.parametrize("kind", BODIES)
@settings(max_examples=60)
@given(
    text=TEXTS.filter(bool),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    data=st.data(),
)
def test_what_came_and_what_comes_are_one_stream(
    kind: str, text: str, cuts: list[int], data: st.DataObject
) -> None:
    whole = list(events_of(form_of(kind), chunks_of(text, cuts)))
    expected = merged([event for piece in whole for event in piece])
    num_pieces = data.draw(st.integers(1, max(1, len(whole) - 2)), label="pieces before the break")
    kept = [event for piece in whole[:num_pieces] for event in piece]
    if len(whole) == 2:  # all came at once, with its end
        return
    so_far = so_far_of(kept)
    rest = list(
        events_of(
            form_of(kind, resume_from=[so_far]),
            chunks_of(text, [data.draw(st.integers(1, 30))], so_far["num_chars"]),
        )
    )
    got = [*kept, *(event for piece in rest for event in piece)]
    assert merged(got) == expected
    numbers = [event["sequence_number"] for event in got if "sequence_number" in event]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("kind", BODIES)
def test_it_goes_with_stream(kind: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        form_of(kind, stream=False, resume_from=[{"token_ids": [5], "num_chars": 1}])
    assert [v.field for v in caught.value.violations] == ["resume_from"]


@pytest.mark.parametrize("kind", ["responses", "messages"])
def test_what_has_its_end_is_not_taken_up(kind: str) -> None:
    entry = {"token_ids": [5], "num_chars": 1, "has_ended": True}
    with pytest.raises(InvalidRequest) as caught:
        form_of(kind, resume_from=[entry])
    assert [v.field for v in caught.value.violations] == ["resume_from[0].has_ended"]


def test_other_seeds_and_prompts_give_other_names() -> None:
    def name(seed: int | None, prompt: list[int]) -> str:
        form = form_of("chat", seed=seed)
        form.begin(0, ANSWER, prompt)
        (piece, _) = events_of(form, chunks_of(CALL, [len(CALL)]))
        (call,) = piece[-1]["choices"][0]["delta"]["tool_calls"]
        assert isinstance(call["id"], str)
        return call["id"]

    assert name(1, [1, 2]) == name(1, [1, 2])
    others = [name(1, [1, 3]), name(2, [1, 2]), name(None, [1, 2]), name(None, [1, 2])]
    assert len({name(1, [1, 2]), *others}) == 5
