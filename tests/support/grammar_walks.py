"""Random outputs that follow a grammar, and random grammars to follow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import strategies as st
from llguidance import LLMatcher

from baton.types import Sampling
from engine.grammar import (
    Grammar,
    GrammarVocabulary,
    Matcher,
    load_vocabulary,
    synthetic_vocabulary,
)
from engine.grammar.matcher import compile_grammar
from engine.grammar.vocabulary import synthetic_tokens

BOX_MODEL = Path(__file__).parents[2] / "models" / "baton-py-6m"

#: End of sequence of the bundled model; any token may serve in the synthetic vocabulary.
END = 0


@cache
def box_vocabulary() -> GrammarVocabulary:
    """Vocabulary of the bundled model, with the 4096 ids of its config."""
    return load_vocabulary(BOX_MODEL, 4096)


@cache
def small_vocabulary() -> GrammarVocabulary:
    """The synthetic one of an oracle engine."""
    return synthetic_vocabulary(1000)


@cache
def _box_tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(BOX_MODEL / "tokenizer.json"))


def box_text(token_ids: list[int]) -> str:
    """What tokens of the bundled model say, the end's left out."""
    return str(_box_tokenizer().decode(token_ids, skip_special_tokens=True))


def small_text(token_ids: list[int]) -> str:
    """As box_text, of the synthetic vocabulary; token 0 is its end."""
    tokens = synthetic_tokens(1000)
    return b"".join(tokens[t] for t in token_ids if t != END).decode()


def matcher_of(
    grammar: Grammar, vocabulary: GrammarVocabulary, ends: tuple[int, ...] = (END,)
) -> Matcher:
    """A matcher before the first token."""
    return Matcher(compile_grammar(grammar, vocabulary), vocabulary, ends)


@cache
def _compiled(grammar: bytes) -> LLMatcher:
    return compile_grammar(Grammar.from_bytes(grammar), small_vocabulary())


def allowed_after(sampling: Sampling) -> Callable[[Sequence[int]], bytes | None] | None:
    """SampleRow.allowed by the output so far, for an oracle engine; None without a grammar."""
    if not sampling.grammar:
        return None
    compiled = _compiled(sampling.grammar)

    def allowed(output: Sequence[int]) -> bytes:
        matcher = Matcher(compiled, small_vocabulary(), sampling.stop_token_ids)
        matcher.advance_many(output)
        return matcher.allowed()

    return allowed


def ids_of(mask: bytes) -> list[int]:
    """The tokens of a mask."""
    return [8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]


def draw_token(mask: bytes, rng: random.Random) -> int:
    """One of a mask's tokens; the end, where it is allowed, more often than others."""
    if mask[END // 8] >> END % 8 & 1 and rng.random() < 0.5:
        return END
    return rng.choice(ids_of(mask))


def walk(matcher: Matcher, rng: random.Random, most: int = 2000) -> list[int]:
    """A random output, to its end or `most` tokens."""
    output: list[int] = []
    while not matcher.is_over and len(output) < most:
        output.append(draw_token(matcher.allowed(), rng))
        matcher.advance(output[-1])
    return output


_CHARS = "ab0 .é日\\n(*"


def _class(chars: str) -> str:
    return "[" + "".join(f"\\{c}" if c in ".(*\\" else c for c in chars) + "]"


def regexes() -> st.SearchStrategy[str]:
    """Regular expressions that Python and Rust read alike, of outputs not too long."""
    leaf = st.one_of(
        st.text("ab0é日", min_size=1, max_size=4),
        st.text("ab0.(*é", min_size=1, max_size=4).map(_class),
        st.sampled_from([r"\.", r"\(", r"\*", r"\\", "[^a]", "[0-9]"]),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
            st.tuples(inner, st.sampled_from(["?", "{0,3}", "{2}"])).map(
                lambda pair: f"({pair[0]}){pair[1]}"
            ),
        ),
        max_leaves=6,
    )


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """JSON Schemas with bounded documents, so that a random output ends."""
    names = st.text("abcé ", min_size=1, max_size=3)
    leaf: st.SearchStrategy[dict[str, Any]] = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.tuples(st.integers(-500, 500), st.integers(0, 1000)).map(
            lambda r: {"type": "integer", "minimum": r[0], "maximum": r[0] + r[1]}
        ),
        st.integers(0, 5).map(lambda n: {"type": "string", "maxLength": n}),
        st.just({"type": "string", "pattern": "^[a-c]{1,3}-[0-9]+(x|y)$", "maxLength": 9}),
        st.just({"type": "string", "format": "date"}),
        st.lists(names | st.integers(-9, 9) | st.none(), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(inner, st.integers(0, 2)).map(
                lambda p: {"type": "array", "items": p[0], "minItems": p[1], "maxItems": 2}
            ),
            st.tuples(st.dictionaries(names, inner, max_size=3), st.booleans()).map(_object),
            st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some}),
        ),
        max_leaves=5,
    )


def _object(parts: tuple[dict[str, Any], bool]) -> dict[str, Any]:
    properties, are_required = parts
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties) if are_required else [],
        "additionalProperties": False,
    }
