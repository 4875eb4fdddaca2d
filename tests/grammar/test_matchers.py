"""A worker's matchers: compiled once, without holding anybody up, forgotten when too many, and errors are each one's own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.errors import EngineFault
from baton.grammar import Grammar, GrammarVocabulary, Matchers
from baton.types import Sampling
from tests.support.grammar_walks import ids_of, small_vocabulary
from tests.support.sim_tiers import InlineExecutor, sim_matchers


def sampling(pattern: str) -> Sampling:
    return Sampling(grammar=Grammar.regex(pattern).to_bytes(), stop_token_ids=frozenset((7,)))


def test_a_sequence_without_a_grammar_has_no_matcher() -> None:
    matchers = sim_matchers()
    assert matchers.is_ready(Sampling())
    assert matchers.matcher(Sampling()) is None


def test_sequences_of_one_grammar_go_their_own_ways() -> None:
    matchers = sim_matchers()
    first, second = matchers.matcher(sampling("ab")), matchers.matcher(sampling("ab"))
    assert first is not None
    assert second is not None
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
        matchers.prepare(sampling("ab"))
        matchers.prepare(sampling("ab"))
        assert not matchers.is_ready(sampling("ab"))
        assert not matchers.is_ready(sampling("cd"))
        gate.set()
        assert matchers.matcher(sampling("cd")) is not None
        assert matchers.is_ready(sampling("ab"))
        assert num_loads == 1
    finally:
        matchers.close()


def test_few_grammars_are_kept_and_a_forgotten_one_is_compiled_again() -> None:
    matchers = Matchers(small_vocabulary, InlineExecutor(), num_kept=2)
    made = [matchers.matcher(sampling(pattern)) for pattern in ("a", "b", "c", "a", "d")]
    assert [ids_of(m.allowed()) for m in made if m] == [[ord(c)] for c in "abcad"]
    assert len(matchers._compiled) == 2


@pytest.mark.parametrize("data", [b"?", Grammar.regex("(").to_bytes()])
def test_what_cannot_be_compiled_fails_each_sequence_by_an_error_of_its_own(data: bytes) -> None:
    matchers = sim_matchers()
    errors = []
    for _ in range(2):
        with pytest.raises(EngineFault) as caught:
            matchers.matcher(Sampling(grammar=data))
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert matchers.matcher(sampling("a")) is not None


def test_a_model_without_a_tokenizer_fails_those_that_need_it() -> None:
    def load() -> GrammarVocabulary:
        raise EngineFault("no tokenizer.json")

    matchers = Matchers(load, InlineExecutor())
    assert matchers.matcher(Sampling()) is None
    with pytest.raises(EngineFault, match="no tokenizer"):
        matchers.matcher(sampling("a"))
