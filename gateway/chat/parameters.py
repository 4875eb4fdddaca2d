"""Parses tool calls with marks around each argument, as GLM and Qwen3-Coder write them, into a JSON
object, incrementally. Pure.

    FIRST --parameter's mark--> VALUE --its end--> NEXT --call's end--> over
      │                           ^                 │
      └── not a call              └──── its mark ───┘

Values are plain text; the tool's JSON Schema gives their types. Strings are emitted as they arrive,
other values when complete.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from gateway.chat.marks import num_held_back

#: Maximum characters of a parameter's mark, name included, and of the name.
_MAX_MARK_CHARS, _MAX_KEY_CHARS = 384, 256

#: Maximum schema nodes visited to find a parameter's types.
_MAX_SCHEMA_PARTS = 256

#: Maximum characters of a value parsed as a Python literal.
_MAX_LITERAL_CHARS = 2**16

_STRING = frozenset({"string"})

#: Lower-case words of Python and JSON, and the JSON they mean.
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}

_TYPE_NAMES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class ParameterFormat:
    """How a model family writes a call's arguments.

    next: matches after the call's name or a value: a parameter's mark, with its name as group 1, or
    the end of the call. marks: beginnings of such matches. value_ends: ends of a value; the longest
    match wins. newline_begins_value: whether a newline after the mark is not part of the value.
    is_text_by_default: whether a value of unknown type is a string; otherwise it may be JSON.
    """

    next: re.Pattern[str]
    marks: tuple[str, ...]
    value_ends: tuple[str, ...]
    newline_begins_value: bool
    is_text_by_default: bool


GLM_PARAMETERS = ParameterFormat(
    re.compile(
        rf"<arg_key>([^<]{{1,{_MAX_KEY_CHARS}}})</arg_key>\s{{0,64}}<arg_value>|</tool_call>"
    ),
    ("<arg_key>", "</tool_call>"),
    ("</arg_value>",),
    newline_begins_value=False,
    is_text_by_default=False,
)
QWEN_PARAMETERS = ParameterFormat(
    re.compile(rf"<parameter=([^<>]{{1,{_MAX_KEY_CHARS}}})>|</function>|</tool_call>"),
    ("<parameter=", "</function>", "</tool_call>"),
    ("\n</parameter>", "</parameter>"),
    newline_begins_value=True,
    is_text_by_default=True,
)


class ParameterScanner:
    """Parses the arguments of one call, from the first mark after the tool's name, with the
    interface of tools.CallScanner. `name` is set once that mark is complete."""

    def __init__(self, form: ParameterFormat, name: str, schema: Mapping[str, Any]) -> None:
        """name: of the tool. schema: of its arguments."""
        self.name: str | None = None
        self.text = ""
        """Text fed but not parsed."""
        self.is_over = False
        self._form = form
        self._tool = name
        self._schema = schema
        self._value_end = re.compile("|".join(map(re.escape, form.value_ends)))
        self._types: frozenset[str] | None = None
        """Types of the current value; None between values. A value that can only be a string is
        emitted as it arrives."""
        self._begins = False
        """Whether the value is still empty."""
        self._value = ""
        """The value so far, unless it is a string."""
        self._num_parameters = 0
        self._arguments: list[str] = []
        """JSON text not taken yet."""

    def feed(self, text: str) -> str:
        """Consume text up to the call's end, and return the rest. If it is not a call, return all
        text fed; then is_over is set and `name` is None."""
        self.text += text
        while not self.is_over:
            before = (self._types, len(self.text))
            if self._types is not None:
                self._read_value(self._types)
            elif self.name is None:
                self._read_first()
            else:
                self._read_next()
            if not self.is_over and before == (self._types, len(self.text)):
                return ""
        rest, self.text = self.text, ""
        return rest

    def take_arguments(self) -> str:
        """Return the arguments' JSON text since the last call."""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

    def _read_first(self) -> None:
        found = self._form.next.match(self.text)
        if found is not None:
            self.name = self._tool
            self._enter(found)
            return
        may_come = len(self.text) < _MAX_MARK_CHARS and any(
            mark.startswith(self.text[: len(mark)]) for mark in self._form.marks
        )
        self.is_over = not may_come

    def _read_next(self) -> None:
        found = self._form.next.search(self.text)
        if found is not None:
            self._enter(found)
        else:  # skip other text
            self.text = self.text[-_MAX_MARK_CHARS:]

    def _enter(self, found: re.Match[str]) -> None:
        self.text = self.text[found.end() :]
        key = found[1]
        if key is None:
            self._arguments.append("}" if self._num_parameters else "{}")
            self.is_over = True
            return
        key = key.strip()
        self._arguments.append("{" if not self._num_parameters else ", ")
        self._arguments.append(f"{_quoted(key)}: ")
        self._num_parameters += 1
        self._begins, self._value = True, ""
        self._types = parameter_types(self._schema, key)
        if not self._types and self._form.is_text_by_default:
            self._types = _STRING
        if self._types == _STRING:
            self._arguments.append('"')

    def _read_value(self, types: frozenset[str]) -> None:
        if self._begins and self.text:
            self._begins = False
            if self._form.newline_begins_value:
                self.text = self.text.removeprefix("\n")
        ends = self._form.value_ends
        end = self._value_end.search(self.text)
        cut = end.start() if end else len(self.text) - num_held_back(self.text, ends)
        text, self.text = self.text[:cut], self.text[end.end() if end else cut :]
        if types == _STRING:
            self._arguments.append(_quoted(text)[1:-1])
        else:
            self._value += text
        if end:
            self._arguments.append('"' if types == _STRING else json_of(self._value, types))
            self._types = None


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Types that a schema allows for a parameter, with "integer" as "number"; empty if it names
    none."""
    properties = schema.get("properties")
    to_see = [properties.get(name)] if isinstance(properties, dict) else []
    seen = set[int]()
    types = set[str]()
    while to_see and len(seen) < _MAX_SCHEMA_PARTS:
        part = to_see.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        given = part.get("type")
        names = given if isinstance(given, list) else [given]
        types.update(it for it in names if isinstance(it, str))
        constants = part.get("enum")
        constants = constants[:_MAX_SCHEMA_PARTS] if isinstance(constants, list) else []
        if "const" in part:
            constants = [*constants, part["const"]]
        if given is None:
            types.update(_TYPE_NAMES[type(constant)] for constant in constants)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(several := part.get(key), list):
                to_see += several[:_MAX_SCHEMA_PARTS]
        to_see.append(_referred(schema, part.get("$ref")))
    return frozenset("number" if it == "integer" else it for it in types)


def _referred(schema: Mapping[str, Any], ref: Any) -> Any:
    """The part of a schema at a reference such as "#/$defs/Color"; None if there is none."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    part: Any = schema
    for key in ref[2:].split("/"):
        part = part.get(key) if isinstance(part, dict) else None
    return part


def json_of(text: str, types: frozenset[str]) -> str:
    """A value as JSON of one of the types, or of any type if empty. A string if no other type
    fits."""
    value = text.strip()
    value = _WORDS.get(value.lower(), value)
    kind = _json_type(value)
    if kind is None and (literal := _json_of_literal(value)) is not None:
        value, kind = literal, _json_type(literal)
    is_string = "string" in types and (kind == "string" or kind not in types)
    return _quoted(text) if kind is None or is_string else value


def _json_type(text: str) -> str | None:
    """The JSON type of a text; None if it is not JSON."""
    try:
        return _TYPE_NAMES[type(json.loads(text, parse_constant=_refuse_constant))]
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _json_of_literal(text: str) -> str | None:
    """Convert a Python list or dict, which some models write, to JSON."""
    if text[:1] not in ("[", "{", "(") or len(text) > _MAX_LITERAL_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
