"""Streams of chats that broke off, in any of the APIs: what a client has of one, and whether that
and what comes then are what one stream sends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from gateway.http.translated_chat import PROGRESS


def documents(text: str) -> list[Any]:
    lines = (line for line in text.split("\n") if line.startswith("data: {"))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def so_far_of(events: Sequence[Any]) -> dict[str, Any]:
    """What a client hands in: as docs/openai.md says."""
    so_far: dict[str, Any] = {"token_ids": [], "num_chars": 0}
    for event in events:
        said = event["choices"][0] if "choices" in event else event
        if "token_ids" in said:
            so_far["token_ids"] += said["token_ids"]
            so_far["num_chars"] += said["num_chars"]
            if "sequence_number" in said:
                so_far["sequence_number"] = said["sequence_number"]
    return so_far


def merged(events: Sequence[Any]) -> list[tuple[Any, str]]:
    """The same events whatever pieces their text came in. A delta of a chat does not say in which
    order its content and its calls were."""
    found: list[tuple[Any, str]] = []
    by_key: dict[Any, str] = {}
    for event in events:
        if event.get("type") == PROGRESS:
            continue
        for key, text in parts_of(event):
            by_key[key] = by_key.get(key, "") + text
            if found and found[-1][0] == key:
                found[-1] = (key, found[-1][1] + text)
            else:
                found.append((key, text))
    return sorted(by_key.items(), key=repr) if "choices" in events[0] else found


_TIMES_AND_COUNTS = re.compile(
    r'"(created_at|completed_at|cache_read_input_tokens|input_tokens|cached_tokens)": \d+'
)


def without_times(events: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Answers without their creation times and cache counts."""
    return [
        (_TIMES_AND_COUNTS.sub("", key) if isinstance(key, str) else key, text)
        for key, text in events
    ]


def parts_of(event: Any) -> Iterator[tuple[Any, str]]:
    """What an event is about, and the text that it adds."""
    if "choices" in event:
        (choice,) = event["choices"]
        delta = choice["delta"]
        for name in ("reasoning_content", "content"):
            if delta.get(name):
                yield (name, delta[name])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield (("call", call["index"], call["id"], call["function"]["name"]), "")
            yield (("arguments", call["index"]), call["function"]["arguments"])
        if choice["finish_reason"]:
            yield (("end", choice["finish_reason"]), "")
        return
    event = {name: value for name, value in event.items() if name != "sequence_number"}
    delta = event.get("delta")
    if isinstance(delta, str):
        event, text = {**event, "delta": ""}, delta
    elif event.get("type") == "content_block_delta":
        (name,) = delta.keys() - {"type"}
        event, text = {**event, "delta": {**delta, name: ""}}, delta[name]
    else:
        text = ""
    yield (json.dumps(event), text)
