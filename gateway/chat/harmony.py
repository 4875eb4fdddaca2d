"""Parses gpt-oss's output in OpenAI's harmony format, incrementally: reasoning, text and tool calls
are separate messages, distinguished by their headers. Pure.

    HEADER --<|message|>--> BODY --<|end|>, <|call|>, <|return|>, or <|start|> of the next--> HEADER

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>                        reasoning
    <|start|>assistant<|channel|>final<|message|>...<|return|>                        text
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>                      text
    ... to=functions.NAME<|channel|>commentary <|constrain|>json<|message|>{...}<|call|>  a call

The prompt ends within the first header. An output that does not begin with a header is text; the
grammar of a forced call, for example, excludes headers. The result does not depend on how the text
was divided. See the guide "OpenAI harmony response format" in OpenAI's cookbook.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gateway.chat.marks import num_held_back
from gateway.chat.tools import CallArguments, CallBegins, Content, Part, Thought

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
#: End of a prompt that makes the answer begin with reasoning.
THINKING = f"{CHANNEL}analysis{MESSAGE}"
#: Marks the beginning of the answer's text.
ANSWERING = f"{CHANNEL}final{MESSAGE}"

_START = "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_END = re.compile("|".join(map(re.escape, ENDS)))
#: Beginnings of a header, or of the rest of the prompt's last header.
_HEADS = (CHANNEL, _START, " to=", "to=")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")

#: Longer headers are text.
_MAX_HEADER_CHARS = 512


class HarmonyParser:
    """Parser of one choice."""

    def __init__(self, new_id: Callable[[], str], *, has_calls: bool, is_thinking: bool) -> None:
        """new_id: generates ids of calls. has_calls: whether the request has tools; otherwise calls
        are text. is_thinking: whether the output begins inside reasoning."""
        self._new_id = new_id
        self._has_calls = has_calls
        self._held = ""
        """Text not emitted yet."""
        self._make: Callable[[str], Part] | None = Thought if is_thinking else None
        """Creates the part for body text; None in a header."""
        self._is_first = not is_thinking
        """Whether it is still open that the output begins with a header."""
        self._begins = is_thinking
        """Whether the body is still empty."""
        self._spoken: set[type[Part]] = set()
        """Kinds of text emitted so far; the next message of such a kind begins on a new line."""
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Consume text, and return the parts that are certain."""
        self._held += text
        parts: list[Part] = []
        while True:
            before = (self._make, len(self._held))
            parts += self._read_header() if self._make is None else self._read_body(self._make)
            if not self._held or before == (self._make, len(self._held)):
                return parts

    def end(self) -> list[Part]:
        """Return the text held back, at the end of the output. An incomplete header is dropped."""
        held, self._held = self._held, ""
        is_header = self._make is None and not (self._is_first and "<|" not in held)
        if not held or is_header:
            return []
        return [self._emitted((self._make or Content)(held))]

    def _read_header(self) -> Iterator[Part]:
        if self._is_first:
            if any(head.startswith(self._held) for head in _HEADS):
                return  # may become a header
            self._is_first = False
            if not self._held.startswith(_HEADS):
                self._make, self._begins = Content, True
                return
        header, mark, rest = self._held.partition(MESSAGE)
        if not mark:
            if len(header) > _MAX_HEADER_CHARS:
                self._make, self._begins = Content, True
            return
        self._held, self._begins = rest, True
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        if recipient and self._has_calls:
            index = self.num_calls
            self.num_calls += 1
            self._make = lambda text: CallArguments(index, text)
            yield CallBegins(index, self._new_id(), recipient[1])
        else:
            self._make = Thought if channel and channel[1] == "analysis" else Content

    def _read_body(self, make: Callable[[str], Part]) -> Iterator[Part]:
        end = _END.search(self._held)
        cut = end.start() if end else len(self._held) - num_held_back(self._held, ENDS)
        text, self._held = self._held[:cut], self._held[cut:]
        if text:
            yield self._emitted(make(text))
        if end:
            self._held = self._held[len(end[0]) :]
            self._make = None

    def _emitted(self, part: Part) -> Part:
        """Begin a message on a new line if one of its kind precedes it."""
        kind = type(part)
        if self._begins and isinstance(part, Content | Thought):
            self._begins = False
            if kind in self._spoken:
                part = type(part)("\n" + part.text)
            self._spoken.add(kind)
        return part
