"""Recompute or fetch is decided by what was measured."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_core.costs import Costs
from worker_core.policy import prefill_policy
from worker_core.tier_costs import Part, SavingGain, TierCosts

BLOCK_SIZE, BLOCK_BYTES = 16, 1000


def costs(token_s: float | None, *read_s_per_block: float, fixed_s: float = 0.0) -> TierCosts:
    """A worker that computes a token in token_s, and tiers that were measured."""
    of_worker = Costs(prefill_policy().local_prefill, 1)
    if token_s is not None:
        for num_tokens in (16, 64, 512):
            of_worker.observe_step(0, num_tokens, num_tokens * token_s)
    tiers = TierCosts(of_worker, len(read_s_per_block), BLOCK_SIZE, BLOCK_BYTES)
    for level, seconds in enumerate(read_s_per_block):
        for num_blocks in (1, 8):
            tiers.observe_read(level, num_blocks * BLOCK_BYTES, fixed_s + num_blocks * seconds)
    return tiers


@given(
    token_s=st.floats(1e-6, 1e-2),
    read_s=st.floats(1e-6, 1e-1),
    fixed_s=st.floats(0, 1.0),
    num_blocks=st.integers(1, 200),
)
def test_a_tier_slower_than_computing_is_never_chosen(
    token_s: float, read_s: float, fixed_s: float, num_blocks: int
) -> None:
    tiers = costs(token_s, read_s, fixed_s=fixed_s)
    num_worth = tiers.num_worth([Part(0, num_blocks)], [False])
    computing_s = num_blocks * BLOCK_SIZE * token_s
    reading_s = fixed_s + num_blocks * read_s
    if abs(computing_s - reading_s) > 1e-6 * computing_s:
        assert num_worth == (num_blocks if reading_s < computing_s else 0)


def test_nothing_pays_before_both_were_measured() -> None:
    assert not costs(None, 1e-6).pays(0)
    unmeasured = TierCosts(costs(1e-3)._costs, 1, BLOCK_SIZE, BLOCK_BYTES)
    assert not unmeasured.pays(0)
    assert unmeasured.num_worth([Part(0, 100)], [False]) == 0


def test_blocks_of_a_slow_tier_after_those_of_a_fast_one_are_computed() -> None:
    tiers = costs(1e-3, 1e-3, 1.0)
    assert tiers.pays(0)
    assert not tiers.pays(1)
    parts = [Part(0, 10), Part(1, 10), Part(0, 10)]
    assert tiers.num_worth(parts, [False, False]) == 10


def test_a_tier_that_becomes_slow_is_left_and_one_that_recovers_is_used_again() -> None:
    tiers = costs(1e-3, 1e-3)
    slow = fast = 0
    while tiers.pays(0):
        tiers.observe_read(0, 32 * BLOCK_BYTES, 5.0)
        slow += 1
    while not tiers.pays(0):
        tiers.observe_read(0, 32 * BLOCK_BYTES, 1e-3)
        fast += 1
    assert slow <= 5
    assert fast <= 250


def test_a_store_that_never_has_anything_is_asked_seldom() -> None:
    tiers = costs(1e-3, 1e-4, fixed_s=0.05)
    parts, is_shared = [Part(0, 10)], [True]
    assert tiers.num_worth(parts, is_shared) == 10
    for _ in range(100):
        tiers.observe_share(0, 0.0)
    assert tiers.num_worth(parts, is_shared) == 0
    assert tiers.num_worth([Part(0, 500)], is_shared) == 500


@pytest.mark.parametrize(("seconds", "saved", "lost"), [(0.1, 0.06, 0.0), (0.2, 0.0, 0.04)])
def test_time_saved_and_time_lost_are_kept_apart(seconds: float, saved: float, lost: float) -> None:
    tiers = costs(1e-3, 1e-3)
    tiers.observe_use(0, 10, seconds)
    assert tiers.saved_s[0] == pytest.approx(saved)
    assert tiers.lost_s[0] == pytest.approx(lost)


def test_saving_goes_on_in_samples_where_nothing_is_read_and_in_full_after_a_read() -> None:
    gain = SavingGain(1000)
    assert all(gain.wants(10) for _ in range(100))
    saved = [gain.wants(16) for _ in range(800)]
    assert 0 < sum(saved) < 0.15 * len(saved)
    runs = [len(list(run)) for wants, run in groupby(saved) if wants]
    assert max(runs) == 64 // 16, "as many adjacent blocks as a prompt has"
    gain.on_read()
    assert all(gain.wants(10) for _ in range(100))
