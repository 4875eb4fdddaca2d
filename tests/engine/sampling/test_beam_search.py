"""Beam search itself, on made-up probabilities: what it must find, and when it must end."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import BeamParams, EarlyStopping, FinishReason, Sampling
from engine.sampling.beam_search import BeamSearch, Candidates, Hypothesis, num_candidates

Tokens = tuple[int, ...]
Model = Callable[[Tokens], list[float]]

STOPS = frozenset({0, 1})


def random_model(seed: int, vocab_size: int) -> Model:
    """Log probabilities of the token after an output, drawn anew for each output."""

    def logprobs(output: Tokens) -> list[float]:
        drawn = random.Random(f"{seed} {output}")
        weights = [drawn.expovariate(1.0) + 1e-3 for _ in range(vocab_size)]
        return [math.log(w / sum(weights)) for w in weights]

    return logprobs


def likeliest(logprobs: Sequence[float], count: int) -> Candidates:
    return sorted(enumerate(logprobs), key=lambda entry: -entry[1])[:count]


def sampling_of(
    width: int,
    max_tokens: int = 4,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC,
    stops: Iterable[int] = STOPS,
) -> Sampling:
    beam = BeamParams(width, length_penalty, early_stopping, num_returned=width)
    return Sampling(max_tokens=max_tokens, stop_token_ids=frozenset(stops), beam=beam)


def run(model: Model, sampling: Sampling) -> tuple[tuple[Hypothesis, ...], list[list[Tokens]]]:
    """What a search finds, and the outputs that ran at each step."""
    search = BeamSearch(sampling, 1, 1000)
    beams: list[Tokens] = [()]
    ran = []
    while True:
        ran.append(beams)
        assert search.num_running == len(beams)
        offered = [likeliest(model(beam), num_candidates(sampling)) for beam in beams]
        step = search.step(offered)
        if step.is_over:
            assert (step.parents, step.token_ids, search.num_running) == ((), (), 0)
            return search.best(), ran
        pairs = zip(step.parents, step.token_ids, strict=True)
        beams = [(*beams[parent], token) for parent, token in pairs]


def every_output(vocab_size: int, max_tokens: int) -> Iterable[Tokens]:
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(vocab_size), repeat=length):
            if STOPS.isdisjoint(tokens[:-1]) and (length == max_tokens or tokens[-1] in STOPS):
                yield tokens


def score_of(model: Model, tokens: Tokens, length_penalty: float) -> float:
    total = sum(model(tokens[:i])[token] for i, token in enumerate(tokens))
    return total / len(tokens) ** length_penalty


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]))
def test_a_search_wide_enough_finds_the_best_of_all(seed: int, length_penalty: float) -> None:
    model = random_model(seed, vocab_size=4)
    outputs = list(every_output(4, max_tokens=3))
    sampling = sampling_of(len(outputs), 3, length_penalty, EarlyStopping.NEVER)
    found, _ = run(model, sampling)
    wanted = sorted((score_of(model, tokens, length_penalty) for tokens in outputs), reverse=True)
    assert [h.score for h in found] == pytest.approx(wanted)
    assert {h.token_ids for h in found} == set(outputs)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 6),
    length_penalty=st.floats(-2, 3),
    early_stopping=st.sampled_from(EarlyStopping),
)
def test_what_holds_of_every_search(
    seed: int, width: int, max_tokens: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    model = random_model(seed, vocab_size=6)
    found, ran = run(model, sampling_of(width, max_tokens, length_penalty, early_stopping))
    assert len(found) == width
    assert len({h.token_ids for h in found}) == width
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    assert len(ran) <= max_tokens
    for h in found:
        assert h.score == pytest.approx(score_of(model, h.token_ids, length_penalty))
        stops = h.token_ids[-1] in STOPS
        assert h.finish is (FinishReason.STOP if stops else FinishReason.LENGTH)
        assert stops or len(h.token_ids) == max_tokens
    for beams in ran:
        assert len(beams) <= width
        assert len(set(beams)) == len(beams)
        assert all(STOPS.isdisjoint(tokens) for tokens in beams)
        totals = [score_of(model, tokens, 0.0) for tokens in beams]
        assert totals == sorted(totals, reverse=True)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 4), length_penalty=st.floats(0.1, 3))
def test_later_ends_find_no_less(seed: int, width: int, length_penalty: float) -> None:
    """The more outputs a search waits for, the better the best: at once, then by present length,
    then by any length."""
    model = random_model(seed, vocab_size=6)
    order = (EarlyStopping.ALWAYS, EarlyStopping.HEURISTIC, EarlyStopping.NEVER)
    runs = [run(model, sampling_of(width, 6, length_penalty, early)) for early in order]
    best = [found[0].score for found, _ in runs]
    steps = [len(ran) for _, ran in runs]
    assert best == sorted(best)
    assert steps == sorted(steps)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 4))
def test_more_candidates_change_nothing(seed: int, width: int) -> None:
    model = random_model(seed, vocab_size=9)
    sampling = sampling_of(width)
    search = BeamSearch(sampling, 1, 1000)
    beams: list[Tokens] = [()]
    while not (step := search.step([likeliest(model(b), 9) for b in beams])).is_over:
        beams = [(*beams[p], t) for p, t in zip(step.parents, step.token_ids, strict=True)]
    assert search.best() == run(model, sampling)[0]


def test_fewer_allowed_tokens_than_beams() -> None:
    """A grammar that leaves two outputs leaves a search of four with two."""
    search = BeamSearch(sampling_of(4, max_tokens=9), 1, 1000)
    step = search.step([[(5, -0.1), (6, -2.0)]])
    assert (step.parents, step.token_ids) == ((0, 0), (5, 6))
    step = search.step([[(0, -0.1)], [(1, -0.1)]])
    assert step.is_over
    assert [h.token_ids for h in search.best()] == [(5, 0), (6, 1)]


def test_short_outputs_that_score_best_are_not_judged_by_the_longest() -> None:
    """With a negative penalty an output scores best at its present length, also for NEVER."""
    search = BeamSearch(sampling_of(2, 10, -1.0, EarlyStopping.NEVER), 1, 1000)
    assert not search.step([[(5, -0.5), (0, -0.9), (6, -3.0)]]).is_over
    # Finished: -0.9, and -1.5 * 2. The best running one has -0.6 * 2 now, and would have -0.6 * 10.
    assert not search.step([[(8, -0.1), (0, -1.0), (9, -4.0)], [(5, -4.0)]]).is_over


def test_only_the_best_finished_outputs_are_kept() -> None:
    search = BeamSearch(sampling_of(1, 10, 1.0, EarlyStopping.NEVER), 1, 1000)
    assert not search.step([[(0, -0.2), (5, -0.3)]]).is_over
    # Another one ends, with -0.8 / 2. What runs on may come to -2.1 / 10: better than that, worse
    # than -0.2.
    assert search.step([[(0, -0.5), (5, -1.8)]]).is_over
    assert [h.token_ids for h in search.best()] == [(0,)]


def test_no_beam_search_asked_for() -> None:
    with pytest.raises(ValueError, match="no beam search"):
        num_candidates(Sampling())
