"""Sampling: each step does what transformers' own does, and a draw depends on its row and key
alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import Sampling
from baton_kernels.sampling import keep_min_p, keep_top_k, keep_top_p
from engine.interface import SampleRow
from engine.sampling.sampler import BrokenRowsError, NothingAllowedError, draw, draw_key

VOCAB = 11


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 3


def row(
    sampling: Sampling, prompt: tuple[int, ...] = (0,), output: tuple[int, ...] = ()
) -> SampleRow:
    return SampleRow(0, sampling, prompt + output, len(prompt))


def draws(logits: torch.Tensor, count: int, **options: float) -> Counter[int]:
    """Token counts over `count` seeds on one row of logits."""
    rows = [row(Sampling(seed=seed, **options)) for seed in range(count)]  # type: ignore[arg-type]
    return Counter(one.token_id for one in draw(logits.expand(count, -1), rows).samples())


def warped(logits: Any, **options: float) -> torch.Tensor:
    """Probabilities [vocab] after transformers' warpers, in its order."""
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    ids: Any = torch.zeros(1, 1, dtype=torch.int64)
    scores: Any = TemperatureLogitsWarper(options["temperature"])(ids, logits)
    if options.get("top_k"):
        scores = TopKLogitsWarper(int(options["top_k"]))(ids, scores)
    if "top_p" in options:
        scores = TopPLogitsWarper(options["top_p"])(ids, scores)
    if "min_p" in options:
        scores = MinPLogitsWarper(options["min_p"])(ids, scores)
    probabilities: torch.Tensor = scores.softmax(-1)[0]
    return probabilities


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.4},
        {"temperature": 2.5},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    """Chi-square of 4,000 seeds against transformers' probabilities, well beyond its 99.99 %
    point."""
    logits = random_logits(1, seed=5)
    counts = draws(logits, 4000, **options)
    probabilities = warped(logits, **options)
    allowed = {i for i, p in enumerate(probabilities.tolist()) if p > 0}
    assert set(counts) <= allowed
    statistic, cells = 0.0, 0
    for token in allowed:
        expected = 4000 * float(probabilities[token])
        if expected >= 5:
            statistic += (counts[token] - expected) ** 2 / expected
            cells += 1
    assert statistic < cells + 4 * math.sqrt(2 * cells) + 15


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(1, VOCAB),
    top_p=st.floats(0.05, 0.999),
    min_p=st.floats(0, 0.9),
)
def test_filters_keep_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = random_logits(3, seed)
    ids = torch.zeros(3, 1, dtype=torch.int64)
    scaled = TemperatureLogitsWarper(temperature)(ids, logits)
    steps: list[tuple[Callable[[torch.Tensor, torch.Tensor], None], float, torch.dtype, Any]] = [
        (keep_top_k, top_k, torch.int64, TopKLogitsWarper(top_k)),
        (keep_top_p, top_p, torch.float32, TopPLogitsWarper(top_p)),
        (keep_min_p, min_p, torch.float32, MinPLogitsWarper(min_p)),
    ]
    ours, theirs = scaled.clone(), scaled
    for keep, value, dtype, warper in steps:
        keep(ours, torch.full((3,), value, dtype=dtype))
        theirs = warper(ids, theirs)
        assert torch.equal(ours, theirs), warper


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    penalty=st.floats(0.5, 2),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=6),
)
def test_repetition_penalty_is_transformers(
    seed: int, penalty: float, prompt: list[int], output: list[int]
) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = random_logits(1, seed)
    ids = torch.tensor([prompt + output])
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    one = row(Sampling(repetition_penalty=penalty), tuple(prompt), tuple(output))
    assert draw(logits, [one]).samples()[0].token_id == int(wanted.argmax())


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = torch.tensor([[5.0, 4.5, 4.0, 0.0]])
    prompt, output = (0, 0, 1, 2), (0, 1, 1)

    def chosen(**options: float) -> int:
        one = row(Sampling(**options), prompt, output)  # type: ignore[arg-type]
        return draw(logits, [one]).samples()[0].token_id

    # After presence p: 5 - p, 4.5 - p, 4, 0. After frequency f: 5 - f, 4.5 - 2f, 4, 0.
    assert chosen(presence_penalty=0.9) == 0
    assert chosen(presence_penalty=1.1) == 2
    assert chosen(frequency_penalty=0.9) == 0
    assert chosen(frequency_penalty=1.1) == 2
    assert chosen(presence_penalty=-3.0, frequency_penalty=-1.0) == 1


def test_logit_bias_and_min_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    biased = Sampling(logit_bias={0: 5.0, 2: -100.0})
    assert draw(logits, [row(biased)]).samples()[0].token_id == 0
    waiting = Sampling(stop_token_ids=frozenset({2}), min_tokens=2, logit_bias={2: 50.0})
    assert draw(logits, [row(waiting)]).samples()[0].token_id == 1
    assert draw(logits, [row(waiting, output=(1,))]).samples()[0].token_id == 1
    # With min_tokens of them there, the next may end the output, as finish_reason has it.
    assert draw(logits, [row(waiting, output=(1, 1))]).samples()[0].token_id == 2


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, 7.0]])
    assert draw(logits, [row(Sampling())]).samples()[0].token_id == 1


def test_very_low_temperatures_are_greedy() -> None:
    logits = random_logits(5, seed=1)
    for temperature in (1e-5, 1e-38):
        options = Sampling(temperature=temperature, top_p=0.9, top_k=5, min_p=0.1)
        got = [one.token_id for one in draw(logits, [row(options)] * 5).samples()]
        assert got == logits.argmax(-1).tolist()


ROWS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {3: 2.0}]),
    min_tokens=st.sampled_from([0, 5]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset({1, 2})]),
    seed=st.integers(0, 2**63),
    logprobs=st.sampled_from([-1, 0, 3]),
)


@settings(max_examples=60, deadline=None)
@given(options=st.lists(ROWS, min_size=1, max_size=6), seed=st.integers(0, 100))
def test_a_row_does_not_depend_on_the_others(options: list[Sampling], seed: int) -> None:
    logits = random_logits(len(options), seed)
    before = logits.clone()
    rows = [row(s, (4, 3), (3, 1)) for s in options]
    together = draw(logits, rows).samples()
    alone = [draw(logits[i : i + 1], [one]).samples()[0] for i, one in enumerate(rows)]
    assert [one.token_id for one in together] == [one.token_id for one in alone]
    assert [one.logprobs is None for one in together] == [s.logprobs < 0 for s in options]
    assert torch.equal(logits, before)


def test_draws_differ_by_seed_position_and_choice() -> None:
    keys = {draw_key(s, p, c) for s in range(-5, 20) for p in range(20) for c in range(20)}
    assert len(keys) == 25 * 20 * 20
    flat = torch.zeros(1, 50_000)
    base = Sampling(temperature=1.0, seed=3)
    tokens = set()
    for output in ((), (1,), (1, 1)):
        for choice in range(3):
            one = SampleRow(0, base, (0, *output), 1, choice)
            tokens.add(draw(flat, [one]).samples()[0].token_id)
    assert len(tokens) == 9


def test_logprobs_are_the_models_before_any_edit() -> None:
    logits = random_logits(1, seed=9)
    options = Sampling(temperature=2.0, top_k=1, logprobs=3, repetition_penalty=1.5)
    one = draw(logits, [row(options, prompt=(1, 2, 3))]).samples()[0]
    wanted = logits.log_softmax(-1)[0]
    assert one.logprobs is not None
    assert one.logprobs.logprob == pytest.approx(float(wanted[one.token_id]), abs=1e-6)
    best = wanted.topk(3)
    assert [token for token, _ in one.logprobs.top] == best.indices.tolist()
    assert [value for _, value in one.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    only = draw(logits, [row(Sampling(logprobs=0))]).samples()[0]
    assert only.logprobs is not None
    assert only.logprobs.top == ()
    whole = draw(logits, [row(Sampling(logprobs=VOCAB))]).samples()[0]
    assert whole.logprobs is not None
    assert {token for token, _ in whole.logprobs.top} == set(range(VOCAB))


def test_logprobs_of_tokens_that_are_asked_for() -> None:
    logits = random_logits(3, seed=9)
    asked = [Sampling(logprobs=2, logprob_token_ids=ids) for ids in ((5, 2, 7), (), (2,))]
    found = draw(logits, [row(options) for options in asked]).samples()
    wanted = logits.log_softmax(-1)
    for index, (one, options) in enumerate(zip(found, asked, strict=True)):
        assert one.logprobs is not None
        ids = options.logprob_token_ids or tuple(wanted[index].topk(2).indices.tolist())
        best = sorted(ids, key=lambda token, of=wanted[index]: -float(of[token]))
        assert [token for token, _ in one.logprobs.top] == best
        assert all(v == pytest.approx(float(wanted[index, t])) for t, v in one.logprobs.top)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    """With a grammar's mask, those that both allow; beside rows that allow all."""
    logits = random_logits(3, seed=4)
    few = Sampling(temperature=temperature, allowed_token_ids=(2, 9, 11))
    mask = (1 << 9 | 1 << 10).to_bytes(2, "little")
    for seed in range(20):
        options = replace(few, seed=seed)
        rows = [row(options), row(Sampling()), row(options)._replace(allowed=mask)]
        first, free, both = draw(logits, rows).samples()
        assert first.token_id in (2, 9, 11)
        assert free.token_id == int(logits[1].argmax())
        assert both.token_id == 9
    neither = row(few)._replace(allowed=(1 << 3).to_bytes(1, "little"))
    with pytest.raises(NothingAllowedError):
        draw(logits[:1], [neither]).samples()


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_broken_rows_are_found_and_draw_some_token(bad: float, options: dict[str, Any]) -> None:
    logits = random_logits(4, seed=2)
    logits[2, 5] = bad
    drawn = draw(logits, [row(Sampling(**options))] * 4)
    assert all(0 <= token < VOCAB for token in drawn.chosen.tolist())
    with pytest.raises(BrokenRowsError) as caught:
        drawn.samples()
    assert caught.value.rows == (2,)


def test_top_k_of_one_is_greedy_at_a_tie() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 7, 9]] = 2.0
    assert draws(logits, 50, temperature=1.0, top_k=1) == {3: 50}
    mixed = [row(Sampling(seed=s, temperature=1.0, top_k=k)) for s in range(9) for k in (1, 3)]
    drawn = [one.token_id for one in draw(logits.expand(len(mixed), -1), mixed).samples()]
    assert set(drawn[::2]) == {3}
    assert len(set(drawn[1::2])) > 1
