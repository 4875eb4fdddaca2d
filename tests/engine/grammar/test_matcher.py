"""Matchers: outputs are what their grammars say, and a matcher's state is that of its tokens,
however it came to it."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import EngineFault, InvalidRequest
from engine.grammar import (
    Grammar,
    GrammarVocabulary,
    Matcher,
    load_vocabulary,
    synthetic_vocabulary,
)
from engine.grammar.vocabulary import synthetic_tokens
from tests.support.grammar_walks import (
    BOX_MODEL,
    END,
    box_text,
    box_vocabulary,
    draw_token,
    ids_of,
    matcher_of,
    regexes,
    schemas,
    small_text,
    small_vocabulary,
    walk,
)

VOCABULARIES = [(box_vocabulary, box_text), (small_vocabulary, small_text)]
vocabularies = st.sampled_from(VOCABULARIES)
seeds = st.integers(0, 2**32)

GRAMMARS = [
    Grammar.json_object(),
    Grammar.json_object(max_whitespace=0),
    Grammar.regex("(ab?|[0-9]{2,4}){1,5}"),
    Grammar.choice(["yes", "yes, but", "no"]),
    Grammar.lark('start: "(" start ")" | "x" start "y" | "z"'),
    Grammar.lark('start: word "!"\nword[suffix="q"]: /[a-z]*/'),
    Grammar.json_schema({"type": "array", "items": {"enum": ["a", 17, None]}, "maxItems": 4}),
]


@given(regexes(), vocabularies, seeds)
@settings(max_examples=30, deadline=None)
def test_an_output_of_a_regex_matches_it(pattern: str, kind: Any, seed: int) -> None:
    make, text_of = kind
    text = text_of(walk(matcher_of(Grammar.regex(pattern), make()), random.Random(seed)))
    assert re.fullmatch(pattern, text)


@given(schemas(), vocabularies, seeds)
@settings(max_examples=30, deadline=None)
def test_an_output_of_a_schema_is_json_that_it_describes(
    schema: dict[str, Any], kind: Any, seed: int
) -> None:
    make, text_of = kind
    matcher = matcher_of(Grammar.json_schema(schema), make())
    text = text_of(walk(matcher, random.Random(seed)))
    assert matcher.is_over
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("most", [0, 1, 5])
def test_white_space_between_parts_is_bounded(most: int) -> None:
    longest = 0
    for seed in range(20):
        grammar = Grammar.json_schema({"type": "array", "items": {"enum": [1, 2]}}, most)
        text = small_text(walk(matcher_of(grammar, small_vocabulary()), random.Random(seed)))
        longest = max([longest, *map(len, re.findall(r"\s+", text))])
    assert longest == most


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=5), seeds)
@settings(max_examples=30, deadline=None)
def test_an_output_of_a_choice_is_one_of_the_texts(texts: list[str], seed: int) -> None:
    matcher = matcher_of(Grammar.choice(texts), small_vocabulary(), (999,))
    output = walk(matcher, random.Random(seed), 200)
    tokens = [t for t in output if t != 999]
    # Zero bytes are texts, too: here another token is the end's.
    assert b"".join(synthetic_tokens(1000)[t] for t in tokens).decode() in texts


@given(st.sampled_from(GRAMMARS), vocabularies, seeds)
@settings(max_examples=30, deadline=None)
def test_forks_and_rollbacks_equal_a_replay(grammar: Grammar, kind: Any, seed: int) -> None:
    make, _ = kind
    rng = random.Random(seed)
    matchers: list[tuple[Matcher, list[int]]] = [(matcher_of(grammar, make()), [])]
    for _ in range(40):
        matcher, output = rng.choice(matchers)
        match rng.choice(["advance", "advance", "advance", "fork", "rollback"]):
            case "advance" if not matcher.is_over:
                output.append(draw_token(matcher.allowed(), rng))
                matcher.advance(output[-1])
            case "fork":
                matchers.append((matcher.fork(), list(output)))
            case "rollback":
                num_back = rng.randint(0, min(4, len(output)))
                matcher.rollback(num_back)
                del output[len(output) - num_back :]
    for matcher, output in matchers:
        replayed = matcher_of(grammar, make())
        replayed.advance_many(output)
        assert matcher.is_over == replayed.is_over
        assert matcher.is_over or matcher.allowed() == replayed.allowed()


@given(st.sampled_from(GRAMMARS), st.integers(0, 8), st.integers(0, 8), seeds)
@settings(max_examples=30, deadline=None)
def test_masks_along_drafts_are_those_of_each_prefix(
    grammar: Grammar, num_good: int, num_random: int, seed: int
) -> None:
    rng = random.Random(seed)
    matcher = matcher_of(grammar, box_vocabulary())
    walk(matcher, rng, rng.randint(0, 3))
    if matcher.is_over:
        return
    good = walk(matcher.fork(), rng, num_good)
    drafts = good + [rng.randrange(4096) for _ in range(num_random)]
    before = matcher.allowed()
    masks = matcher.allowed_along(drafts)
    assert matcher.allowed() == before
    step = matcher.fork()
    for mask, draft in zip(masks, drafts, strict=False):
        assert mask == step.allowed()
        if mask is not masks[-1]:
            step.advance(draft)
    # It is cut where the next draft is not allowed or ends the output, and nowhere else.
    num_kept = len(masks) - 1
    if num_kept < len(drafts):
        assert drafts[num_kept] == END or not step.allows(drafts[num_kept])


def test_an_output_ends_where_it_is_complete_and_only_there() -> None:
    vocabulary = small_vocabulary()
    matcher = matcher_of(Grammar.regex("ab?"), vocabulary, (5, 6))
    assert ids_of(matcher.allowed()) == [ord("a")]
    matcher.advance(ord("a"))
    assert ids_of(matcher.allowed()) == [5, 6, ord("b")]
    matcher.advance(ord("b"))
    assert ids_of(matcher.allowed()) == [5, 6]
    matcher.advance(6)
    assert matcher.is_over
    with pytest.raises(EngineFault, match="has ended"):
        matcher.allowed()
    with pytest.raises(EngineFault, match="after its end"):
        matcher.advance(5)
    matcher.rollback(2)
    assert ids_of(matcher.allowed()) == [5, 6, ord("b")]


def test_a_stop_token_with_a_text_ends_only_a_complete_output_where_another_way_is_left() -> None:
    vocabulary = small_vocabulary()
    matcher = matcher_of(Grammar.regex("(a|b)a"), vocabulary, (ord("a"),))
    assert ids_of(matcher.allowed())[0] == ord("b")
    matcher.advance(ord("b"))
    assert ids_of(matcher.allowed()) == [ord("a")]


def test_a_token_that_is_not_allowed_is_an_error_of_its_own() -> None:
    matcher = matcher_of(Grammar.regex("ab"), small_vocabulary())
    with pytest.raises(EngineFault, match="structured output"):
        matcher.advance(ord("x"))


@pytest.mark.slow
def test_what_costs_too_much_to_follow_fails_in_the_end() -> None:
    """It has 2**60 states, and each is found when it is needed: the limit on them is met."""
    matcher = matcher_of(Grammar.regex(r"(.|\n)*[aeiou](.|\n){60}"), small_vocabulary(), ())
    with pytest.raises(InvalidRequest, match=r"structured_output: .*costs more to follow"):
        walk(matcher, random.Random(1), 100_000)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("vocab_size", [300, 4000, 4096, 4097, 4200])
def test_only_tokens_that_model_and_tokenizer_know_are_allowed(vocab_size: int) -> None:
    vocabulary = load_vocabulary(BOX_MODEL, vocab_size)
    any_bytes = Grammar.lark('%llguidance { "allow_invalid_utf8": true }\nstart: /(?s:.)*/')
    mask = matcher_of(any_bytes, vocabulary, ()).allowed()
    assert len(mask) == -(-vocab_size // 8)
    assert max(ids_of(mask)) == min(vocab_size, 4096) - 1
    fixed = {"const": {"returns": ["self", "def __init__"]}}
    matcher = matcher_of(Grammar.json_schema(fixed), vocabulary)
    output = walk(matcher, random.Random(vocab_size))
    assert matcher.is_over
    assert json.loads(box_text(output)) == fixed["const"]


def test_a_vocabulary_that_cannot_say_it_fails_the_request() -> None:
    no_letters = synthetic_vocabulary(60)
    matcher = matcher_of(Grammar.regex("[0-9]a"), no_letters)
    with pytest.raises(InvalidRequest, match="no token of the model continues it"):
        walk(matcher, random.Random(1))


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_grammars_survive_their_bytes(grammar: Grammar) -> None:
    assert Grammar.from_bytes(grammar.to_bytes()) == grammar


def test_the_bytes_of_a_gateway_that_says_nothing_of_white_space_are_read() -> None:
    data = b'{"kind": "regex", "text": "a"}'
    assert Grammar.from_bytes(data) == Grammar.regex("a")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"kind": "regex"}',
        b'{"kind": ["regex"], "text": "a"}',
        b'{"kind": "json_schema", "text": "{}", "max_whitespace": 1e400}',
    ],
)
def test_bytes_that_are_no_grammar_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.grammar"):
        Grammar.from_bytes(data)


def test_a_grammar_of_a_later_make_is_the_workers_fault() -> None:
    with pytest.raises(EngineFault, match="update it"):
        Grammar.from_bytes(b'{"kind": "gbnf", "text": ""}')


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(EngineFault, match=r"no tokenizer\.json"):
        load_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineFault, match="cannot be read"):
        load_vocabulary(tmp_path)
    assert isinstance(small_vocabulary(), GrammarVocabulary)
