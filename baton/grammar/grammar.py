"""A grammar as it travels: what an output must look like, in one canonical form for all ways to say
it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, get_args

from baton.errors import EngineFault

GrammarKind = Literal["json_schema", "regex", "lark"]

#: White space between the parts of a JSON document. Bounded, so that no model writes white space
#: for ever.
_JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,32}"

#: What a regular expression takes literally: letters and digits of any script, and what is beyond
#: ASCII.
_PLAIN = re.compile(r"[A-Za-z0-9]|[^\x00-\x7f]")


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is a JSON Schema, a regular expression (Rust's syntax), or a grammar in Lark's
    syntax."""

    kind: GrammarKind
    text: str

    @classmethod
    def json_schema(cls, schema: dict[str, Any]) -> Grammar:
        """Any document that the schema describes. The order of its properties is that of the
        output."""
        return cls("json_schema", json.dumps(schema, separators=(",", ":")))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Any text that `pattern` matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        return cls("regex", "|".join(f"({_literal(text)})" for text in texts))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Any text that the rule `start` derives."""
        return cls("lark", text)

    @classmethod
    def from_bytes(cls, data: bytes) -> Grammar:
        """The inverse of to_bytes. Raises EngineFault if it is of another make: gateway and tier do
        not fit together."""
        try:
            told = json.loads(data)
        except ValueError as error:
            raise EngineFault(f"a grammar's bytes are not JSON: {error}") from None
        match told:
            case {"kind": kind, "text": str(text)} if _is_kind(kind):
                return cls(kind, text)
        raise EngineFault("a grammar of a kind that this worker does not know; update it")

    def to_bytes(self) -> bytes:
        """As TokenSampling.grammar holds it."""
        return json.dumps({"kind": self.kind, "text": self.text}).encode()

    def to_llguidance(self) -> str:
        """As llguidance reads it. Raises ValueError if a schema is no JSON object."""
        # Imported late: a process that meets no grammar need not load it.
        from llguidance import LLMatcher

        match self.kind:
            case "regex":
                return LLMatcher.grammar_from_regex(self.text)
            case "lark":
                return LLMatcher.grammar_from_lark(self.text)
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(
                    self.text, overrides={"whitespace_pattern": _JSON_WHITESPACE}
                )


def _is_kind(kind: object) -> TypeGuard[GrammarKind]:
    return kind in get_args(GrammarKind)


def _literal(text: str) -> str:
    """A regular expression that matches `text` alone."""
    return "".join(c if _PLAIN.fullmatch(c) else f"\\x{ord(c):02X}" for c in text)
