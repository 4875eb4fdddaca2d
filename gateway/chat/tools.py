"""Parses tool calls in the formats of Hermes and Qwen, Llama, Mistral, DeepSeek, Kimi, GLM and
Qwen3-Coder, incrementally. Pure.

A call is a JSON object after a mark of the format, or arguments between marks (parameters.py):

    CONTENT --mark--> HEADER --"{", "<"--> CALL --its end--> AFTER --mark, or "{"--> HEADER
       ^                 |                   |                 |
       └── not a call ───┴───────────────────┴── other text ───┘

Text outside calls is content. A possible beginning of a mark, and space that may precede a call,
are held back until the next text decides, and emitted if no call follows. The result does not
depend on how the text was divided, so a broken stream is resumed by feeding its text again
(gateway/http/chat.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from gateway.chat.marks import num_held_back
from gateway.chat.parameters import (
    GLM_PARAMETERS,
    QWEN_PARAMETERS,
    ParameterFormat,
    ParameterScanner,
)

#: Maximum characters between a mark and its call: the tool's name and delimiters.
_MAX_HEADER_CHARS = 256

#: Maximum space held back before a possible call; more is content.
_MAX_SPACE_CHARS = 256


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the message."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """Start of the next call, with its tool's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Part = Content | Thought | CallBegins | CallArguments


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model family writes calls.

    marks: begin a call. fillers: allowed after a mark, besides spaces. header: allowed between mark
    and object; if its group matches, it is the tool's name, and the object is the arguments alone.
    is_bare: whether an output may begin with an object, without a mark. is_list: whether objects
    may follow one another without a mark. parameters: format of arguments that are not a JSON
    object.
    """

    marks: tuple[str, ...]
    fillers: tuple[str, ...] = ()
    header: str = r"\s*()"
    is_bare: bool = False
    is_list: bool = False
    parameters: ParameterFormat | None = None

    @property
    def opening(self) -> str:
        """First characters of the object, or of the arguments."""
        return "<" if self.parameters else "{"


#: Formats by vLLM's parser names.
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat(("<tool_call>",), ("</tool_call>",)),
        "llama3_json": ToolFormat(("<|python_tag|>",), (";",), is_bare=True, is_list=True),
        "mistral": ToolFormat(
            ("[TOOL_CALLS]",), (",", "]"), r"\s*\[?\s*,?\s*([\w.-]*)(?:\[ARGS\])?\s*", is_list=True
        ),
        "deepseek_v3": ToolFormat(
            ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
            ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            r"\s*(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*",
        ),
        "kimi_k2": ToolFormat(
            ("<|tool_call_begin|>", "<|tool_calls_section_begin|><|tool_call_begin|>"),
            ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
        ),
        "glm45": ToolFormat(
            ("<tool_call>",), ("</tool_call>",), r"\s*([\w.-]+)\s*", parameters=GLM_PARAMETERS
        ),
        # The outer mark is sometimes omitted.
        "qwen3_coder": ToolFormat(
            ("<tool_call>\n<function=", "<tool_call><function=", "<function="),
            ("</tool_call>",),
            r"([\w.-]+)>\s*",
            parameters=QWEN_PARAMETERS,
        ),
    }
)

_NO_SCHEMAS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

#: Forced calls by a grammar: a JSON list and nothing else.
REQUIRED_FORMAT = ToolFormat(("[",), (",", "]"), is_list=True)


def format_of_template(template: str) -> str:
    """The format that a chat template shows to its model; Hermes if it shows none."""
    for mark, name in (
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁call", "deepseek_v3"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<arg_key>", "glm45"),
        ("<parameter=", "qwen3_coder"),
        ("<tool_call>", "hermes"),
        ("<|python_tag|>", "llama3_json"),
        ('"parameters"', "llama3_json"),
    ):
        if mark in template:
            return name
    return "hermes"


class _Mode(Enum):
    CONTENT = auto()
    HEADER = auto()
    CALL = auto()
    AFTER = auto()


class ToolParser:
    """Parser of one choice."""

    def __init__(
        self,
        form: ToolFormat | None,
        new_id: Callable[[], str],
        name: str | None = None,
        schemas: Mapping[str, Mapping[str, Any]] = _NO_SCHEMAS,
    ) -> None:
        """form: None for an output without calls. new_id: generates ids of calls. name: of the
        tool, if the whole output is its arguments. schemas: JSON Schemas of arguments by tool name;
        they give the types of arguments that are not JSON."""
        self._form = form
        self._new_id = new_id
        self._schemas = schemas
        self._header = re.compile(form.header if form else "")
        self._name = name
        self._mode = _Mode.CONTENT
        self._held = ""
        """Text not emitted yet; empty inside a call."""
        self._mark = ""
        """Text from the mark to the current position."""
        self._call: CallScanner | ParameterScanner = CallScanner()
        self._has_begun = False
        """Whether CallBegins was emitted."""
        self._is_first = True
        """Whether only space has been seen."""
        self._has_content = False
        """Whether content has been seen since the last call."""
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Consume text, and return the parts that are certain. Adjacent parts of a kind are not
        joined."""
        if self._name is not None:
            return list(self._named(text))
        if self._form is None:
            return [Content(text)] if text else []
        self._held += text
        parts: list[Part] = []
        while True:
            before = (self._mode, len(self._held))
            parts += self._step(self._form)
            if not self._held or before == (self._mode, len(self._held)):
                return parts

    def end(self) -> list[Part]:
        """Return the text held back, at the end of the output."""
        held, self._held = self._held, ""
        if self._mode is _Mode.HEADER:
            held = self._mark + held
        elif self._mode is _Mode.CALL and not self._has_begun:
            held = self._mark + self._call.text
        elif self._mode is _Mode.AFTER:
            held = held.strip()
        return [Content(held)] if held else []

    def _named(self, text: str) -> Iterator[Part]:
        if not self.num_calls:
            yield self._begin(self._name or "")
        if text:
            yield CallArguments(0, text)

    def _step(self, form: ToolFormat) -> Iterator[Part]:
        """Follow one arrow of the diagram, if the text held back allows it."""
        match self._mode:
            case _Mode.CONTENT:
                yield from self._read_content(form)
            case _Mode.HEADER:
                yield from self._read_header(form)
            case _Mode.CALL:
                yield from self._read_call()
            case _Mode.AFTER:
                self._read_after(form)

    def _read_content(self, form: ToolFormat) -> Iterator[Part]:
        if self._is_first and form.is_bare:
            stripped = self._held.lstrip()
            if not stripped:
                return
            if stripped[0] == "{":
                self._enter_header(self._held[: -len(stripped)], stripped)
                return
        found = [(i, -len(m), m) for m in form.marks if (i := self._held.find(m)) >= 0]
        if found:
            start, _, mark = min(found)
            text, rest = self._held[:start], self._held[start + len(mark) :]
            if text and self._is_content(text):
                yield Content(text)
            self._enter_header(mark, rest)
            return
        cut = len(self._held) - num_held_back(self._held, form.marks)
        text = self._held[:cut]
        if text and self._is_content(text):
            self._held = self._held[cut:]
            self._is_first, self._has_content = False, True
            yield Content(text)

    def _is_content(self, text: str) -> bool:
        """Whether text before a mark is content, and not space before a call."""
        return self._has_content or len(text) > _MAX_SPACE_CHARS or bool(text.strip())

    def _enter_header(self, mark: str, rest: str) -> None:
        self._mode, self._mark, self._held = _Mode.HEADER, mark, rest
        self._is_first = self._has_content = False

    def _read_header(self, form: ToolFormat) -> Iterator[Part]:
        start = self._held.find(form.opening)
        if max(start, len(self._held) if start < 0 else 0) > _MAX_HEADER_CHARS:
            yield self._no_call(self._mark + self._held[:_MAX_HEADER_CHARS])
            self._held = self._held[_MAX_HEADER_CHARS:]
            return
        if start < 0:
            return
        header = self._header.fullmatch(self._held[:start])
        self._mark += self._held[:start]
        self._held = self._held[start:]
        if header is None:
            yield self._no_call(self._mark)
            return
        name = header[1] or None
        if form.parameters and name:
            schema = self._schemas.get(name, {})
            self._call = ParameterScanner(form.parameters, name, schema)
        else:
            self._call = CallScanner(name)
        self._mode, self._has_begun = _Mode.CALL, False

    def _read_call(self) -> Iterator[Part]:
        self._held = self._call.feed(self._held)
        name = self._call.name
        if name and not self._has_begun:
            self._has_begun = True
            yield self._begin(name)
        if self._has_begun:
            new = self._call.take_arguments()
            if new:
                yield CallArguments(self.num_calls - 1, new)
        if self._call.is_over:
            if self._has_begun:
                self._mode = _Mode.AFTER
            else:
                yield self._no_call(self._mark + self._call.text)

    def _read_after(self, form: ToolFormat) -> None:
        rest = self._held.lstrip()
        for filler in form.fillers:
            if rest.startswith(filler):
                self._held = rest[len(filler) :]
                return
        if any(text.startswith(rest) for text in (*form.fillers, *form.marks)):
            return  # may become a mark, unless empty
        self._held = rest
        if form.is_list and rest[0] == "{":
            self._mode, self._mark = _Mode.HEADER, ""
        else:
            self._mode = _Mode.CONTENT

    def _begin(self, name: str) -> CallBegins:
        self.num_calls += 1
        return CallBegins(self.num_calls - 1, self._new_id(), name)

    def _no_call(self, text: str) -> Content:
        self._mode, self._has_content = _Mode.CONTENT, True
        return Content(text)


_SPACE = frozenset(" \t\r\n")


class CallScanner:
    """Scans one JSON object from its opening bracket: `{"name": ..., "arguments": {...}}`, members
    in any order; "parameters" (Llama) means "arguments". Checks only brackets and strings.

    `name` is set once its member is complete; arguments are emitted incrementally.
    """

    def __init__(self, name: str | None = None) -> None:
        """name: of the tool, if the object is only its arguments."""
        self.name = name
        self.text = ""
        """All text fed."""
        self.is_over = False
        self._is_raw = name is not None
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._key: str | None = None
        """Key of the current value; None while reading a key."""
        self._read = ""
        """The current key or value."""
        self._arguments: list[str] = []
        """JSON text not taken yet."""

    def feed(self, text: str) -> str:
        """Consume text up to the object's end, and return the rest."""
        for index, char in enumerate(text):
            self._feed(char)
            if self.is_over:
                self.text += text[: index + 1]
                return text[index + 1 :]
        self.text += text
        return ""

    def take_arguments(self) -> str:
        """Return the arguments' JSON text since the last call."""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

    def _feed(self, char: str) -> None:
        was_in_string = self._is_in_string
        is_at_top = self._depth == 1
        self._track(char)
        if self._is_raw:
            self._arguments.append(char)
        elif self._key is None:
            if is_at_top and (was_in_string or char == '"'):
                self._read += char
            elif is_at_top and char == ":":
                self._key, self._read = _string_of(self._read) or "", ""
        elif is_at_top and not was_in_string and (char == "," or self.is_over):
            self._end_member()
        elif self._read or char not in _SPACE:
            self._read += char
            # Arguments may be a string that contains JSON; it is parsed when complete.
            is_after = is_at_top and char in _SPACE and not was_in_string
            if self._is_of_arguments and self._read[0] != '"' and not is_after:
                self._arguments.append(char)

    def _track(self, char: str) -> None:
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_in_string = False
        elif char == '"':
            self._is_in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_over = self._depth <= 0

    @property
    def _is_of_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _end_member(self) -> None:
        value = _string_of(self._read.strip())
        if self._key == "name":
            self.name = value
        elif self._is_of_arguments and value is not None:
            self._arguments.append(value)
        self._key, self._read = None, ""


def _string_of(text: str) -> str | None:
    """The value of a JSON string; None if invalid."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
