"""Grammars in one canonical, serialisable form."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeGuard, get_args

from baton.errors import EngineFault, FieldViolation, InvalidRequest
from baton.types import DEFAULT_MAX_WHITESPACE, MAX_WHITESPACE
from engine.grammar.json_schema import narrowed

GrammarKind = Literal["json_schema", "regex", "lark", "llguidance"]

#: Bounded white space between the parts of a JSON document: unbounded, small models generate white
#: space until max_tokens.
_WHITESPACE = r"[\x20\x0A\x0D\x09]"

#: Characters that are literal in a regular expression: ASCII letters and digits, and all non-ASCII.
_PLAIN = re.compile(r"[A-Za-z0-9]|[^\x00-\x7f]")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar. text: a JSON Schema, a regular expression (Rust syntax), a Lark grammar, or
    llguidance's list of grammars. max_whitespace: maximum white-space characters between two parts
    of a JSON document."""

    kind: GrammarKind
    text: str
    max_whitespace: int = DEFAULT_MAX_WHITESPACE

    @classmethod
    def json_schema(
        cls, schema: dict[str, Any], max_whitespace: int = DEFAULT_MAX_WHITESPACE
    ) -> Grammar:
        """Any document that satisfies the schema, as narrowed; properties are generated in the
        schema's order."""
        text = json.dumps(narrowed(schema), separators=(",", ":"))
        return cls("json_schema", text, max_whitespace)

    @classmethod
    def json_object(cls, max_whitespace: int = DEFAULT_MAX_WHITESPACE) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, max_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Any text that matches `pattern` as a whole."""
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
        """Embed this grammar in Lark `rules`, which refer to it as @answer. Raises ValueError as
        to_llguidance does."""
        read = self.to_llguidance()
        answer = {"lark_grammar": read} if self.kind == "lark" else json.loads(read)["grammars"][0]
        grammars = [{"lark_grammar": rules}, {**answer, "name": "answer"}]
        return Grammar("llguidance", json.dumps({"grammars": grammars}))

    @classmethod
    def from_bytes(cls, data: bytes) -> Grammar:
        """Inverse of to_bytes. Raises EngineFault for a kind of a later version, InvalidRequest for
        invalid data."""
        try:
            parsed = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _no_grammar(f"is not JSON: {error}") from None
        match parsed:
            case {"kind": str(kind), "text": str(text)}:
                # Gateways of 0.1.0 omit it.
                most = parsed.get("max_whitespace", DEFAULT_MAX_WHITESPACE)
                if not isinstance(most, int):
                    raise _no_grammar("its max_whitespace is no integer")
                if not _is_kind(kind):
                    fault = "a grammar of a kind that this worker does not know; update it"
                    raise EngineFault(fault)
                return cls(kind, text, min(max(most, 0), MAX_WHITESPACE))
        raise _no_grammar("has no kind or no text")

    def to_bytes(self) -> bytes:
        """Serialise for TokenSampling.grammar."""
        return json.dumps(asdict(self)).encode()

    def to_llguidance(self) -> str:
        """Convert to llguidance's format. Raises ValueError if a schema is not a JSON object."""
        # Imported late: processes without grammars need not load it.
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
    """A regular expression that matches `text` only."""
    return "".join(c if _PLAIN.fullmatch(c) else f"\\x{ord(c):02X}" for c in text)
