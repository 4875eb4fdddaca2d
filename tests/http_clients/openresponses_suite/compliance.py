"""What Open Responses' compliance test asks of a server at BASE_URL, in our words: its requests,
and the published schema of the answer and of every event (openresponses-types)."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping
from enum import EnumMeta
from typing import Any, get_args

import httpx
import pytest
from openresponses_types import types
from pydantic import BaseModel

URL = f"{os.environ['BASE_URL']}/responses"

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place now.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
    },
}
#: One red point.
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGA"
    "hKmMIQAAAABJRU5ErkJggg=="
)


def user(content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": content}


TEXT = {"input": [user("Greet me in three words.")]}
SYSTEM = {
    "input": [
        {"type": "message", "role": "system", "content": "Speak like a sailor."},
        user("Greet me."),
    ]
}
CALL = {"input": [user("How is the weather in Lisbon?")], "tools": [WEATHER]}
#: Of a model that thinks.
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
IMAGE = {
    "input": [
        user(
            [
                {"type": "input_text", "text": "What is in this picture?"},
                {"type": "input_image", "image_url": PICTURE},
            ]
        )
    ]
}
TURNS = {
    "input": [
        user("I am Ada."),
        {"type": "message", "role": "assistant", "content": "Hello Ada!"},
        user("Who am I?"),
    ]
}


def _events_by_type() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, cls in inspect.getmembers(types, inspect.isclass):
        if name.endswith("StreamingEvent"):
            kind = cls.model_fields["type"].annotation
            values = [each.value for each in kind] if isinstance(kind, EnumMeta) else get_args(kind)
            yield from ((value, cls) for value in values)


EVENTS: Mapping[str, type[BaseModel]] = dict(_events_by_type())


def answer(asked: Mapping[str, Any]) -> types.ResponseResource:
    response = httpx.post(URL, json={"model": "scripted", **asked}, timeout=60)
    assert response.status_code == 200, response.text
    return types.ResponseResource.model_validate(response.json())


def streamed(asked: Mapping[str, Any]) -> tuple[list[dict[str, Any]], types.ResponseResource]:
    """The events, each checked by its schema, and the answer in the last one."""
    body = {"model": "scripted", **asked, "stream": True}
    events = []
    with httpx.stream("POST", URL, json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                EVENTS[event["type"]].model_validate(event)
                events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events, types.ResponseResource.model_validate(events[-1]["response"])


@pytest.mark.parametrize("asked", [TEXT, SYSTEM, TURNS], ids=["text", "system", "turns"])
def test_text(asked: Mapping[str, Any]) -> None:
    found = answer(asked)
    assert found.output
    assert found.status == "completed"


def test_streamed_text() -> None:
    events, found = streamed(TEXT | NO_THOUGHTS)
    assert found.status == "completed"
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == found.output[-1].content[0].text


def test_call() -> None:
    (call,) = [item for item in answer(CALL).output if item.type == "function_call"]
    assert "location" in json.loads(call.arguments)


def test_streamed_call() -> None:
    events, _ = streamed(CALL | NO_THOUGHTS)
    kinds = {event["type"] for event in events}
    arguments = "response.function_call_arguments"
    assert {f"{arguments}.delta", f"{arguments}.done"} <= kinds
    for kind in ("added", "done"):
        items = [e["item"] for e in events if e["type"] == f"response.output_item.{kind}"]
        assert "function_call" in {item["type"] for item in items}


def test_reasoning() -> None:
    assert answer(TEXT).output[0].type == "reasoning"


def test_streamed_reasoning() -> None:
    events, _ = streamed(TEXT)
    assert "response.reasoning.delta" in {event["type"] for event in events}


def test_image() -> None:
    assert answer(IMAGE).status == "completed"
