"""A process that compiles grammars, to contain hostile ones: python -m
gateway.intake.grammar_compiler

Start line: {"folder": str, "max_whitespace": int}, the model's and Grammar's. Question: a
StructuredOutput, {"field": str, "value": ..., "free_text": {...} or null}. Answer: {"grammar":
str}, the canonical form, or {"error": str}. See gateway.intake.child_main. The process dies of a
grammar that needs more memory or stack than a worker should spend on it.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import BatonError, InvalidRequest
from engine.grammar import FreeText, Grammar, GrammarVocabulary, Matcher, load_vocabulary
from engine.grammar.matcher import compile_grammar
from gateway.intake.child_main import Answer, address_space_bytes, limit_memory, serve

#: Address space for compiling, in bytes, beyond that of the idle process.
_MAX_MORE_BYTES = 512 * 2**20

#: Bytes; much less than the stack of a worker's threads, which leaves a margin there.
_STACK_BYTES = 2**20

#: Tokens of two random trial outputs that detect unusable grammars: one with each token rolled back
#: once, and one that avoids ending early.
_NUM_TAKEN_BACK, _NUM_GOING_ON = 32, 128

#: Any id serves as end token here.
_END = 0


def grammar_of(field: str, value: Any, max_whitespace: int) -> Grammar:
    """The grammar of one field of StructuredOutput. Raises ValueError with a one-line message if it
    is invalid."""
    match field:
        case "json_schema":
            return Grammar.json_schema(_parsed(value), max_whitespace)
        case "json_object":
            return Grammar.json_object(max_whitespace)
        case "regex":
            return Grammar.regex(value)
        case "choice":
            return Grammar.choice(value)
        case "grammar":
            return Grammar.lark(value)
    raise ValueError(f"{field} is unknown here")


def try_grammar(grammar: Grammar, vocabulary: GrammarVocabulary) -> None:
    """Compile the grammar and follow random outputs. Raises ValueError or BatonError with a
    one-line message on failure."""
    compiled = compile_grammar(grammar, vocabulary)
    draw = random.Random(0)
    matcher = Matcher(compiled, vocabulary, (_END,))
    for _ in range(_NUM_TAKEN_BACK):
        token_id = _some_token(int.from_bytes(matcher.allowed(), "little"), vocabulary, draw)
        matcher.advance(token_id)
        # As for rejected drafts: not everything in Lark's syntax can be rolled back.
        matcher.rollback(1)
        matcher.advance(token_id)
        if matcher.is_over:
            break
    matcher = Matcher(compiled, vocabulary, (_END,))
    for _ in range(_NUM_GOING_ON):
        going_on = int.from_bytes(matcher.allowed(), "little") & ~(1 << _END)
        if not going_on:
            break
        matcher.advance(_some_token(going_on, vocabulary, draw))


def make_answer(start: Mapping[str, Any]) -> Answer:
    """See the module's docstring."""
    vocabulary: GrammarVocabulary | None = None
    trouble = ""
    try:
        vocabulary = load_vocabulary(Path(start["folder"]))
    except BatonError as error:
        trouble = f"not with this model: {error.message}"
    limit_memory(address_space_bytes() + _MAX_MORE_BYTES)
    threading.stack_size(_STACK_BYTES)

    def answer(question: Mapping[str, Any]) -> Mapping[str, str]:
        if vocabulary is None:
            return {"error": trouble}
        return _in_thread(question, vocabulary, start["max_whitespace"])

    return answer


def _in_thread(
    question: Mapping[str, Any], vocabulary: GrammarVocabulary, max_whitespace: int
) -> Mapping[str, str]:
    """Compute the answer on a small stack."""
    answer: dict[str, str] = {"error": "the compiler failed"}

    def find() -> None:
        try:
            grammar = grammar_of(question["field"], question["value"], max_whitespace)
            try_grammar(grammar, vocabulary)
            if (free := question["free_text"]) is not None:
                free_text = FreeText(**{**free, "instead": tuple(free["instead"])})
                grammar = free_text.around(grammar, vocabulary.tokenizer)
                try_grammar(grammar, vocabulary)
        except InvalidRequest as error:
            answer["error"] = error.violations[0].description
        except BatonError as error:
            answer["error"] = error.message
        except ValueError as error:
            answer["error"] = str(error)
        except (RecursionError, MemoryError):
            answer["error"] = "takes too much memory to compile, or is nested too deep"
        else:
            answer.clear()
            answer["grammar"] = grammar.to_bytes().decode()

    thread = threading.Thread(target=find)
    thread.start()
    thread.join()
    return answer


def _parsed(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None
    if not isinstance(schema, dict):
        raise ValueError('must be a JSON object, such as {"type": "object"}')  # noqa: TRY004
    return schema


def _some_token(bits: int, vocabulary: GrammarVocabulary, draw: random.Random) -> int:
    """A random token of a mask (not uniform): the first at or after a random id, else the first."""
    first = draw.randrange(vocabulary.vocab_size)
    ahead = bits >> first
    if ahead:
        return first + (ahead & -ahead).bit_length() - 1
    return (bits & -bits).bit_length() - 1


if __name__ == "__main__":
    serve(make_answer)
