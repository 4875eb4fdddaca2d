"""Draft lengths are those with the most tokens per second, and none where verifying costs more than
it gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from worker_core.speculation.draft_lengths import (
    CAUTION,
    MIN_CHANCE,
    Candidate,
    StepPrices,
    choose_lengths,
)

chances = st.floats(0.0, 0.99)
candidates = st.lists(st.builds(Candidate, chances, chances, st.integers(0, 3)), max_size=3)


def no_draft_cost(num_sequences: int, num_drafts: int) -> float:  # noqa: ARG001
    return 0.0


def prices(
    num_sequences: int, step_s: Callable[[int], float], max_num_drafts: int = 100
) -> StepPrices:
    return StepPrices(num_sequences, max_num_drafts, step_s, no_draft_cost)


def rate_of(lengths: list[int], given_to: list[Candidate], price: StepPrices) -> float:
    gain = sum(
        CAUTION * candidate.first * candidate.later**place
        for candidate, length in zip(given_to, lengths, strict=True)
        for place in range(length)
    )
    return (price.num_rows + gain) / price.step_s(sum(lengths))


@given(candidates, st.integers(0, 5), st.floats(0.0, 2.0))
def test_no_other_lengths_give_more(given_to: list[Candidate], others: int, slope: float) -> None:
    num_sequences = len(given_to) + others + 1
    price = prices(num_sequences, lambda drafts: 1.0 + slope * drafts)
    lengths = choose_lengths(given_to, price)
    best = max(
        rate_of(list(tried), given_to, price)
        for tried in itertools.product(*(range(c.max_num_drafts + 1) for c in given_to))
    )
    ignored = MIN_CHANCE * 9 / price.step_s(0)
    assert best - ignored - 1e-9 <= rate_of(lengths, given_to, price) <= best + 1e-9


@given(candidates, st.integers(1, 64))
def test_nothing_is_drafted_where_a_row_costs_what_it_costs_elsewhere(
    given_to: list[Candidate], others: int
) -> None:
    """A saturated machine: time goes with rows, and no draft is surer than a token."""
    num_sequences = len(given_to) + others
    assert not any(
        choose_lengths(given_to, prices(num_sequences, lambda n: float(num_sequences + n)))
    )


@given(candidates, st.integers(1, 64), st.floats(0.0, 1.0))
def test_nothing_is_drafted_where_drafting_takes_longer_than_it_saves(
    given_to: list[Candidate], others: int, step_s: float
) -> None:
    num_sequences = len(given_to) + others
    price = StepPrices(
        num_sequences, 100, lambda _: 1.0 + step_s, lambda num, most: 2.0 * num * most
    )
    assert not any(choose_lengths(given_to, price))


@given(candidates, st.integers(0, 4))
def test_rows_are_not_exceeded(given_to: list[Candidate], most: int) -> None:
    lengths = choose_lengths(given_to, prices(4, lambda _: 1.0, most))
    assert sum(lengths) <= most
    assert all(n <= c.max_num_drafts for n, c in zip(lengths, given_to, strict=True))


def test_a_free_row_is_used_for_the_likeliest_draft() -> None:
    sure, unsure = Candidate(0.9, 0.9, 4), Candidate(0.5, 0.2, 4)
    assert choose_lengths([unsure, sure], prices(2, lambda _: 1.0, 3)) == [0, 3]
    assert choose_lengths([unsure, sure], prices(2, lambda _: 1.0, 5)) == [1, 4]


def test_a_ridge_is_filled_and_not_crossed() -> None:
    """Eight rows are free, and the ninth doubles the step."""
    many = [Candidate(0.8, 0.8, 8)] * 2
    price = prices(2, lambda drafts: 1.0 if drafts <= 6 else 2.0)
    assert sum(choose_lengths(many, price)) == 6


def test_large_batches_fill_the_step_too() -> None:
    many = [Candidate(0.9, 0.9, 4)] * 64
    assert choose_lengths(many, prices(64, lambda rows: 1.0 + rows / 1e6, 500)) == [4] * 64
