"""Answers and streams of completions and chats in one form, and the faults of their form. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any


@dataclass(frozen=True, slots=True)
class Position:
    """One token of an answer with its log probability, and the most probable tokens there."""

    token: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """positions: empty without log probabilities."""

    text: str = ""
    finish: str | None = None
    positions: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. cached: of the prompt, read from a cache; None if unknown."""

    prompt: int
    completion: int
    total: int
    cached: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """choices: by index, without gaps. faults: of the form, as in words after an end."""

    choices: tuple[Choice, ...]
    usage: Usage | None
    faults: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(choice.text for choice in self.choices)


def answer_of(document: Mapping[str, Any]) -> Answer:
    """Read a whole answer."""
    parts = document.get("choices") or ()
    choices, faults = _by_index({_index(part): _choice(part) for part in parts})
    return Answer(choices, _usage(document.get("usage")), faults)


@dataclass(slots=True)
class _Pieces:
    """Of one choice."""

    texts: list[str] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    finish: str | None = None


def assemble(events: Iterable[str], *, is_cut: bool = False) -> Answer:
    """Put a stream together. events: their data. is_cut: the reader stopped before the end."""
    choices: dict[int, _Pieces] = {}
    faults: list[str] = []
    usage: Usage | None = None
    is_over = False
    for data in events:
        if is_over:
            faults.append("something came after the stream's end")
        if data == "[DONE]":
            is_over = True
            continue
        try:
            document = json.loads(data)
        except ValueError:
            faults.append(f"an event is no JSON: {data!r}")
            continue
        if "error" in document:
            faults.append(f"an error within the stream: {json.dumps(document['error'])}")
            continue
        usage = _usage(document.get("usage")) or usage
        for part in document.get("choices") or ():
            index, choice = _index(part), _choice(part)
            pieces = choices.setdefault(index, _Pieces())
            if pieces.finish and (choice.text or choice.positions or choice.finish):
                faults.append(f"something came after the end of choice {index}")
            pieces.texts.append(choice.text)
            pieces.positions += choice.positions
            pieces.finish = choice.finish or pieces.finish
    if not is_cut:
        faults += [f"choice {i} has no end" for i, own in choices.items() if not own.finish]
        faults += [] if is_over else ["the stream has no [DONE]"]
    found, missing = _by_index(
        {
            index: Choice("".join(own.texts), own.finish, tuple(own.positions))
            for index, own in choices.items()
        }
    )
    return Answer(found, usage, (*faults, *missing))


def _index(part: Mapping[str, Any]) -> int:
    return int(part.get("index", 0))


def _by_index(choices: Mapping[int, Choice]) -> tuple[tuple[Choice, ...], tuple[str, ...]]:
    """Choices in order, and faults of their numbers."""
    is_right = sorted(choices) == list(range(len(choices)))
    faults = () if is_right else (f"choices are numbered {sorted(choices)}",)
    return tuple(choices[index] for index in sorted(choices)), faults


def _choice(part: Mapping[str, Any]) -> Choice:
    message = part.get("message") or part.get("delta") or {}
    # Thoughts and content are one text here.
    parts = (part.get("text"), message.get("reasoning_content"), message.get("content"))
    text = "".join(filter(None, parts))
    return Choice(text, part.get("finish_reason"), tuple(_positions(part.get("logprobs"))))


def _positions(logprobs: Mapping[str, Any] | None) -> Iterator[Position]:
    """Of a completion, or of a chat."""
    if not logprobs:
        return
    for entry in logprobs.get("content") or ():
        top = {each["token"]: each["logprob"] for each in entry.get("top_logprobs") or ()}
        yield Position(entry["token"], entry["logprob"], top)
    tokens: Sequence[str] = logprobs.get("tokens") or ()
    tops = logprobs.get("top_logprobs") or ()
    padded = chain(tops, [{}] * (len(tokens) - len(tops)))
    values = logprobs.get("token_logprobs") or ()
    for token, logprob, top in zip(tokens, values, padded, strict=True):
        if logprob is not None:
            yield Position(token, logprob, top or {})


def _usage(value: Mapping[str, Any] | None) -> Usage | None:
    if not value:
        return None
    details = value.get("prompt_tokens_details") or {}
    prompt, completion, total = (
        int(value.get(f"{name}_tokens") or 0) for name in ("prompt", "completion", "total")
    )
    return Usage(prompt, completion, total, details.get("cached_tokens"))
