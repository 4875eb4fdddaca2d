"""A call of a tool as a model writes it, token by token: its name, and the text of its arguments
before it is whole. Pure."""

from __future__ import annotations

import json

_SPACE = frozenset(" \t\r\n")


class CallScanner:
    """One JSON object, from its first bracket on: `{"name": ..., "arguments": {...}}`, with the
    members in any order ("parameters" is taken for "arguments", as Llama writes it). Nothing is
    checked but brackets and strings.

    `name` is known once its member is whole; the arguments are, piece by piece.
    """

    def __init__(self, name: str | None = None) -> None:
        """name: of the tool, where the object is its arguments alone."""
        self.name = name
        self.text = ""
        """All that was fed."""
        self.is_over = False
        self._is_raw = name is not None
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._key: str | None = None
        """Of the member whose value comes; None while a key does."""
        self._read = ""
        """Of the key, or of the value."""
        self._arguments: list[str] = []
        """Not yet taken."""

    def feed(self, text: str) -> str:
        """Take characters up to the object's end; what is left of them."""
        for index, char in enumerate(text):
            self._feed(char)
            if self.is_over:
                self.text += text[: index + 1]
                return text[index + 1 :]
        self.text += text
        return ""

    def take_arguments(self) -> str:
        """What is new of the arguments' JSON text."""
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
            # A string of arguments is JSON within JSON: it is read when it is whole.
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
    """A JSON string's value; None if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
