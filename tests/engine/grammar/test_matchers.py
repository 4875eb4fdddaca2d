"""A worker's matchers: compiled once, without holding anybody up, forgotten when too many, and
errors are each one's own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from baton.errors import BatonError, EngineFault, InvalidRequest
from baton.types import Sampling
from engine.grammar import (
    Grammar,
    GrammarVocabulary,
    Matcher,
    MatcherFuture,
    Matchers,
    with_grammar_ready,
)
from tests.support.grammar_walks import ids_of, small_vocabulary
from tests.support.sim_tiers import InlineExecutor, sim_matchers


def sampling(pattern: str) -> Sampling:
    return Sampling(grammar=Grammar.regex(pattern).to_bytes(), stop_token_ids=frozenset((7,)))


def matcher_of(matchers: Matchers, sampling: Sampling) -> Matcher:
    matcher_future = matchers.submit(sampling)
    return matcher_future.matcher()


@dataclass
class Waiting:
    """Something that a step may compute."""

    matcher_future: MatcherFuture | None


def test_sequences_of_one_grammar_go_their_own_ways() -> None:
    matcher_future = sim_matchers().submit(sampling("ab"))
    first, second = matcher_future.matcher(), matcher_future.matcher()
    first.advance(ord("a"))
    assert ids_of(first.allowed()) == [ord("b")]
    assert ids_of(second.allowed()) == [ord("a")]


def test_a_grammar_is_compiled_beside_the_caller_and_once() -> None:
    gate = threading.Event()
    num_loads = 0

    def load() -> GrammarVocabulary:
        nonlocal num_loads
        num_loads += 1
        gate.wait()
        return small_vocabulary()

    matchers = Matchers(load, ThreadPoolExecutor(1))
    try:
        first, again, other = (matchers.submit(sampling(p)) for p in ("ab", "ab", "cd"))
        assert first.compiled is again.compiled
        assert not first.is_ready
        slow, quick = Waiting(first), Waiting(None)
        assert with_grammar_ready([slow, quick]) == [quick]
        assert with_grammar_ready([slow]) == []
        gate.set()
        other.matcher()
        assert first.is_ready
        assert with_grammar_ready([slow, quick]) == [slow, quick]
        assert num_loads == 1
    finally:
        gate.set()
        matchers.close()


def test_nobody_waits_where_there_is_nobody() -> None:
    assert with_grammar_ready([]) == []


def test_few_grammars_are_kept_and_a_forgotten_one_still_serves_who_ordered_it() -> None:
    matchers = Matchers(small_vocabulary, InlineExecutor(), num_kept=2)
    futures = [matchers.submit(sampling(pattern)) for pattern in ("a", "b", "c", "a", "d")]
    made = [matcher_future.matcher() for matcher_future in futures if matcher_future]
    assert [ids_of(matcher.allowed()) for matcher in made] == [[ord(c)] for c in "abcad"]
    assert len(matchers._compiled) == 2


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'{"kind": "gbnf", "text": ""}', EngineFault),
        (b"?", InvalidRequest),
        (Grammar.regex("(").to_bytes(), InvalidRequest),
    ],
)
def test_what_cannot_be_compiled_fails_each_sequence_by_an_error_of_its_own(
    data: bytes, kind: type[BatonError]
) -> None:
    matchers = sim_matchers()
    errors = []
    for _ in range(2):
        with pytest.raises(kind) as caught:
            matcher_of(matchers, Sampling(grammar=data))
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert matcher_of(matchers, sampling("a"))


@pytest.mark.parametrize("trouble", [EngineFault("no tokenizer"), OSError("no tokenizer")])
def test_a_model_without_a_vocabulary_fails_those_that_need_it(trouble: Exception) -> None:
    def load() -> GrammarVocabulary:
        raise trouble

    matchers = Matchers(load, InlineExecutor())
    with pytest.raises(EngineFault, match="no tokenizer"):
        matcher_of(matchers, sampling("a"))
