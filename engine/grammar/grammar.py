"""A grammar as it travels: what an output must look like, in one canonical form for all ways to say
it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeGuard, get_args

from baton.errors import EngineFault, FieldViolation, InvalidRequest
from baton.types import DEFAULT_MAX_WHITESPACE, MAX_WHITESPACE

GrammarKind = Literal["json_schema", "regex", "lark", "llguidance"]

#: White space between the parts of a JSON document: bounded, so that no model writes white space
#: for ever, and small ones do not spend their tokens on it.
_WHITESPACE = r"[\x20\x0A\x0D\x09]"

#: What a regular expression takes literally: letters and digits of any script, and what is beyond
#: ASCII.
_PLAIN = re.compile(r"[A-Za-z0-9]|[^\x00-\x7f]")


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is a JSON Schema, a regular expression (Rust's syntax), a grammar in Lark's syntax, or
    several grammars as llguidance takes them. max_whitespace: most white-space characters between
    two parts of a JSON document."""

    kind: GrammarKind
    text: str
    max_whitespace: int = DEFAULT_MAX_WHITESPACE

    @classmethod
    def json_schema(
        cls, schema: dict[str, Any], max_whitespace: int = DEFAULT_MAX_WHITESPACE
    ) -> Grammar:
        """Any document that the schema describes. The order of its properties is that of the
        output."""
        text = json.dumps(schema, separators=(",", ":"))
        return cls("json_schema", text, max_whitespace)

    @classmethod
    def json_object(cls, max_whitespace: int = DEFAULT_MAX_WHITESPACE) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, max_whitespace)

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

    def within(self, rules: str) -> Grammar:
        """Any text of `rules`, in Lark's syntax, in which @answer is a text of this grammar. Raises
        ValueError as to_llguidance does."""
        read = self.to_llguidance()
        answer = {"lark_grammar": read} if self.kind == "lark" else json.loads(read)["grammars"][0]
        grammars = [{"lark_grammar": rules}, {**answer, "name": "answer"}]
        return Grammar("llguidance", json.dumps({"grammars": grammars}))

    @classmethod
    def from_bytes(cls, data: bytes) -> Grammar:
        """The inverse of to_bytes. Raises EngineFault if it is of a kind of a later make, and
        InvalidRequest if it is none."""
        try:
            parsed = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _no_grammar(f"is not JSON: {error}") from None
        match parsed:
            case {"kind": str(kind), "text": str(text)}:
                # Gateways of 0.1.0 do not say.
                most = parsed.get("max_whitespace", DEFAULT_MAX_WHITESPACE)
                if not isinstance(most, int):
                    raise _no_grammar("its max_whitespace is no integer")
                if not _is_kind(kind):
                    fault = "a grammar of a kind that this worker does not know; update it"
                    raise EngineFault(fault)
                return cls(kind, text, min(max(most, 0), MAX_WHITESPACE))
        raise _no_grammar("has no kind or no text")

    def to_bytes(self) -> bytes:
        """As TokenSampling.grammar holds it."""
        return json.dumps(asdict(self)).encode()

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
                pattern = f"{_WHITESPACE}{{0,{self.max_whitespace}}}"
                return LLMatcher.grammar_from_json_schema(
                    self.text, overrides={"whitespace_pattern": pattern}
                )
            case "llguidance":
                return self.text


def _no_grammar(fault: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation("sampling.grammar", fault))


def _is_kind(kind: object) -> TypeGuard[GrammarKind]:
    return kind in get_args(GrammarKind)


def _literal(text: str) -> str:
    """A regular expression that matches `text` alone."""
    return "".join(c if _PLAIN.fullmatch(c) else f"\\x{ord(c):02X}" for c in text)
