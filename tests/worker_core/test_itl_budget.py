"""How long next tokens may wait for prompts: near the percentile without any, and a few longer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_core.itl_budget import LONG_SHARE, MAX_LONG_STEPS, TAIL_FACTOR, ItlBudget


@given(st.floats(1e-4, 1.0), st.integers(1, 64))
def test_gaps_that_are_all_alike_may_be_a_little_longer(gap_s: float, num_decoding: int) -> None:
    budget = ItlBudget(10.0)
    assert budget.spare_s(gap_s) == 0.0
    for _ in range(200):
        budget.on_step(num_decoding, gap_s, gap_s)
    assert budget.spare_s(gap_s) == pytest.approx((TAIL_FACTOR - 1) * gap_s, abs=0.06 * gap_s)
    assert budget.spare_s(gap_s / 2) > gap_s / 2, "a step of few has more to spare"


def gaps_with_spikes(spikes_per_10_000: int, added_s: float = 0.0) -> list[float]:
    """Steps of 5 ms, of which so many take 50, each made longer by what is added."""
    every = 10_000 // spikes_per_10_000
    return [(0.05 if n % every == 0 else 0.005) + added_s for n in range(20_000)]


@pytest.mark.parametrize("spikes_per_10_000", [10, 50, 200, 1000])
def test_all_gaps_made_longer_by_what_is_spare_keep_the_percentile(spikes_per_10_000: int) -> None:
    budget = ItlBudget(10.0)
    plain = gaps_with_spikes(spikes_per_10_000)
    for gap_s in plain:
        budget.on_step(4, gap_s, 0.005)
    spare_s = budget.spare_s(0.005)
    assert spare_s > 0.0005
    longer = gaps_with_spikes(spikes_per_10_000, spare_s)
    p99_s, longer_p99_s = (sorted(gaps)[-len(gaps) // 100] for gaps in (plain, longer))
    assert longer_p99_s <= (TAIL_FACTOR + 0.06) * p99_s


def test_what_is_spare_follows_a_machine_that_changed() -> None:
    budget = ItlBudget(10.0)
    for gap_s in (0.05, 0.005):
        for _ in range(20_000):
            budget.on_step(4, gap_s, gap_s)
    assert budget.spare_s(0.005) == pytest.approx((TAIL_FACTOR - 1) * 0.005, abs=0.0004)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=400))
def test_no_more_gaps_are_long_than_their_share_whoever_decodes(widths: list[int]) -> None:
    """A step takes a whole chunk whenever it may."""
    budget = ItlBudget(10.0)
    num_gaps = num_long = 0
    for num_decoding in widths * 10:
        num_gaps += num_decoding
        is_long = budget.allows_long(num_decoding)
        num_long += num_decoding * is_long
        if is_long:
            budget.on_step_beside(num_decoding, is_long=True)
        else:
            budget.on_step(num_decoding, 0.005, 0.005)
    assert num_long <= LONG_SHARE * num_gaps + max(widths)


@pytest.mark.slow
def test_only_a_few_whole_chunks_are_saved_up() -> None:
    budget = ItlBudget(10.0)
    for _ in range(100_000):
        budget.on_step(4, 0.005, 0.005)
    num_long = 0
    while budget.allows_long(4):
        budget.on_step_beside(4, is_long=True)
        num_long += 1
    assert num_long <= MAX_LONG_STEPS
