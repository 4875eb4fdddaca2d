"""A call of a tool whose arguments stand each between marks of its own, as GLM and Qwen3-Coder
write them: read piece by piece, and given as a JSON object. Pure.

    FIRST --parameter's mark--> VALUE --its end--> NEXT --call's end--> over
      │                           ^                 │
      └── not a call              └──── its mark ───┘

A value is plain text: what it stands for is known by the tool's JSON Schema. A text is given as it
comes, anything else when it is whole.
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

#: Longest mark of a parameter, its name within, and the longest name.
_MAX_MARK_CHARS, _MAX_KEY_CHARS = 384, 256

#: Most parts of a schema that are looked at for the types of one parameter.
_MAX_SCHEMA_PARTS = 256

#: Longest value that is tried as a literal of Python.
_MAX_LITERAL_CHARS = 2**16

_STRING = frozenset({"string"})

#: What a model may write that has seen them as Python's.
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
    """How a family of models writes the arguments of a call.

    next: what may follow the call's name, or a value: the mark of a parameter, whose group is its
    name, or the end of the call. marks: what those begin with. value_ends: of which the longest
    that fits ends a value. newline_begins_value: whether one behind the mark is none of the value.
    is_text_by_default: whether a value of no known type is text; else it may be JSON.
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
    """The arguments of one call, from the first mark behind its tool's name on; used as
    tools.CallScanner is. `name` is known once that mark is whole."""

    def __init__(self, form: ParameterFormat, name: str, schema: Mapping[str, Any]) -> None:
        """name: of the tool. schema: of its arguments."""
        self.name: str | None = None
        self.text = ""
        """What was fed and not read."""
        self.is_over = False
        self._form = form
        self._tool = name
        self._schema = schema
        self._value_end = re.compile("|".join(map(re.escape, form.value_ends)))
        self._types: frozenset[str] | None = None
        """Of the value that comes, which is read as text if that is its only one; None between
        values."""
        self._begins = False
        """Whether nothing of the value was read yet."""
        self._value = ""
        """What was read of it, unless it is text."""
        self._num_parameters = 0
        self._arguments: list[str] = []
        """Not yet taken."""

    def feed(self, text: str) -> str:
        """Take characters up to the call's end; what is left of them. All that was fed is left if
        it is no call: it is over then, without a name."""
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
        """What is new of the arguments' JSON text."""
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
        else:  # what is neither is passed over
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
    """What a tool's schema lets a parameter be, "integer" called "number"; nothing if it does not
    say."""
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
    """The part of a schema that a reference such as "#/$defs/Color" names, if there is one."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    part: Any = schema
    for key in ref[2:].split("/"):
        part = part.get(key) if isinstance(part, dict) else None
    return part


def json_of(text: str, types: frozenset[str]) -> str:
    """A value as JSON of one of some types, or of any if there are none: a string if it is no other
    that it may be."""
    value = text.strip()
    value = _WORDS.get(value.lower(), value)
    kind = _json_type(value)
    if kind is None and (literal := _json_of_literal(value)) is not None:
        value, kind = literal, _json_type(literal)
    is_string = "string" in types and (kind == "string" or kind not in types)
    return _quoted(text) if kind is None or is_string else value


def _json_type(text: str) -> str | None:
    """None if it is no JSON."""
    try:
        return _TYPE_NAMES[type(json.loads(text, parse_constant=_refuse_constant))]
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _json_of_literal(text: str) -> str | None:
    """A list or dict of Python's, which some models write, as JSON."""
    if text[:1] not in ("[", "{", "(") or len(text) > _MAX_LITERAL_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
