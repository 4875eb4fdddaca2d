"""The oracle engine keeps to all that a row may ask for, so that tests without a model mean
something."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import EngineFault
from baton.types import BeamParams, Sample, Sampling
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.oracle import (
    OracleEngine,
    OracleOptions,
    oracle_tokens,
)
from engine.sampling.beam_search import BeamSearch, num_candidates
from tests.support.oracle_reference import oracle_beams, oracle_prompt_logprobs

VOCAB = 20
PROMPT = (4, 7, 1)


def ask(row: SampleRow, block_size: int = 2) -> Sample:
    engine = OracleEngine(OracleOptions(num_blocks=16, block_size=block_size, vocab_size=VOCAB))
    part = SequenceSlice(row.token_ids, 0, range(15, -1, -1), (row,))
    return engine.forward(Batch((part,)))[0][0]


def mask_of(allowed: set[int]) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(3, "little")


@settings(deadline=None)
@given(
    allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 50),
)
def test_only_allowed_tokens_come(allowed: set[int], temperature: float, seed: int) -> None:
    sampling = Sampling(temperature=temperature, seed=seed, max_tokens=6)
    mask = mask_of(allowed)
    output = oracle_tokens(PROMPT, sampling, VOCAB, allowed=lambda _: mask)
    assert len(output) == 6
    assert set(output) <= allowed


@settings(deadline=None)
@given(words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2), max_size=12))
def test_bad_words_do_not_come(words: list[list[int]]) -> None:
    vocab = 6
    sampling = Sampling(max_tokens=30, bad_words=tuple(map(tuple, words)))
    text = [*PROMPT, *oracle_tokens(PROMPT, sampling, vocab)]
    for word in words:
        ends = range(max(len(PROMPT), len(word) - 1), len(text))
        assert all(text[end + 1 - len(word) : end + 1] != word for end in ends)


@settings(deadline=None)
@given(min_tokens=st.integers(0, 12))
def test_an_output_does_not_end_before_min_tokens(min_tokens: int) -> None:
    stops = frozenset(range(VOCAB // 2))
    sampling = Sampling(max_tokens=40, min_tokens=min_tokens, stop_token_ids=stops)
    output = oracle_tokens(PROMPT, sampling, VOCAB)
    assert stops.isdisjoint(output[:-1])
    assert len(output) > min_tokens


def test_no_token_to_choose_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="no token"):
        ask(SampleRow(2, Sampling(), PROMPT, 3, allowed=b""))


@settings(deadline=None)
@given(token_id=st.integers(0, VOCAB - 1), num_top=st.integers(0, VOCAB + 2))
def test_a_scored_token_is_told_with_probabilities_that_add_up(token_id: int, num_top: int) -> None:
    sampling = Sampling(prompt_logprobs=num_top, temperature=1.0)
    one = ask(SampleRow(2, sampling, PROMPT, 3, scored_token_id=token_id))
    assert one.token_id == token_id
    assert one.logprobs is not None
    values = [value for _, value in one.logprobs.top]
    assert len(values) == min(num_top, VOCAB)
    assert values == sorted(values, reverse=True)
    if num_top >= VOCAB:
        assert math.fsum(map(math.exp, values)) == pytest.approx(1.0, abs=1e-5)
        assert dict(one.logprobs.top)[token_id] == one.logprobs.logprob


def test_log_probabilities_are_those_of_the_prefix_alone() -> None:
    """Whatever is asked for: of a prompt, of an output, of a beam."""
    scored = oracle_prompt_logprobs((*PROMPT, 5), Sampling(prompt_logprobs=VOCAB), VOCAB)[-1]
    drawn = ask(SampleRow(2, Sampling(temperature=2.0, logprobs=VOCAB), PROMPT, 3)).logprobs
    beam = Sampling(beam=BeamParams(VOCAB))
    offered = ask(SampleRow(2, beam, PROMPT, 3), block_size=4).logprobs
    assert drawn is not None
    assert offered is not None
    assert scored.top == drawn.top == offered.top


def test_a_beam_is_offered_what_it_is_allowed() -> None:
    sampling = Sampling(beam=BeamParams(2), stop_token_ids=frozenset({3}), min_tokens=1)
    one = ask(SampleRow(2, sampling, PROMPT, 3, allowed=mask_of({3, 5, 6, 9, 11})))
    assert one.logprobs is not None
    assert len(one.logprobs.top) == num_candidates(sampling) == 3
    assert {token for token, _ in one.logprobs.top} <= {5, 6, 9, 11}
    assert one.token_id == one.logprobs.top[0][0]


@settings(deadline=None)
@given(width=st.integers(1, 5), block_size=st.integers(1, 5))
def test_beams_do_not_depend_on_blocks(width: int, block_size: int) -> None:
    beam = BeamParams(width, num_returned=width)
    sampling = Sampling(max_tokens=5, stop_token_ids=frozenset({2, 3, 4}), beam=beam)
    search = BeamSearch(sampling, len(PROMPT), 100)
    beams = [PROMPT]
    while True:
        rows = [SampleRow(len(tokens) - 1, sampling, tokens, len(PROMPT)) for tokens in beams]
        told = [ask(row, block_size).logprobs for row in rows]
        step = search.step([one.top for one in told if one is not None])
        if step.is_over:
            break
        pairs = zip(step.parents, step.token_ids, strict=True)
        beams = [(*beams[parent], token_id) for parent, token_id in pairs]
    assert search.best() == oracle_beams(PROMPT, sampling, VOCAB)


def test_a_step_lasts_what_it_is_told_to_by_its_new_tokens() -> None:
    """Its own work is a part of that, not added to it: a sleep cannot end early, so neither does a
    step."""
    options = OracleOptions(num_blocks=16, vocab_size=VOCAB, step_s=0.01, token_s=0.005)
    engine = OracleEngine(options)
    row = SampleRow(len(PROMPT) - 1, Sampling(), PROMPT, len(PROMPT))
    begin_s = time.perf_counter()
    engine.forward(Batch((SequenceSlice(PROMPT, 0, range(16), (row,)),)))
    assert time.perf_counter() - begin_s >= 0.01 + 0.005 * len(PROMPT)
