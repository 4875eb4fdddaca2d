"""What a decode worker learns of speeds, and what it makes of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import Slo
from worker_core.costs import Costs, LinearFit
from worker_core.gap_rule import Pace
from worker_core.itl_budget import KeepPercentile
from worker_core.policy import LocalPrefillPolicy, gap_rule_of

POLICY = LocalPrefillPolicy(
    default_threshold=16, max_threshold=2048, is_pinned=False, gap_rule=KeepPercentile(2.0)
)

SECONDS = st.floats(1e-6, 1e-2)
AMOUNTS = st.lists(st.integers(1, 4000), min_size=3, max_size=30, unique=True)


@given(SECONDS, SECONDS, AMOUNTS)
def test_a_fit_finds_the_line_that_it_is_shown(
    fixed: float, slope: float, amounts: list[int]
) -> None:
    fit = LinearFit()
    for amount in amounts:
        fit.observe(amount, fixed + slope * amount)
    assert fit.slope == pytest.approx(slope, rel=1e-4)
    assert fit.predict(1000) == pytest.approx(fixed + slope * 1000, rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 10)), max_size=40))
def test_whatever_a_fit_is_shown_it_predicts_no_negative_times(
    observations: list[tuple[int, float]],
) -> None:
    fit = LinearFit()
    for amount, seconds in observations:
        fit.observe(amount, seconds)
    assert fit.fixed >= 0
    assert fit.slope >= 0


def test_a_fit_follows_a_machine_that_changed() -> None:
    fit = LinearFit()
    for amount in (1, 50, 100) * 50:
        fit.observe(amount, amount * 1e-3)
    for amount in (1, 50, 100) * 100:
        fit.observe(amount, amount * 5e-3)
    assert fit.slope == pytest.approx(5e-3, rel=0.05)


def trained(
    *, local_s: float, remote_s: float, overhead_s: float, policy: LocalPrefillPolicy = POLICY
) -> Costs:
    """A worker that computes a token of a prompt in local_s, and gets one from the prefill tier in
    remote_s after overhead_s; a decode step takes 10 ms."""
    costs = Costs(policy, 128)
    for num_tokens in (10, 100, 300, 900, 1500):
        costs.observe_step(4, 0, 0.01)
        costs.observe_gaps(4, 0, 0.01)
        costs.observe_step(0, num_tokens, local_s * num_tokens)
        costs.handoff.observe(num_tokens, overhead_s + remote_s * num_tokens)
    return costs


def test_the_threshold_is_where_both_ways_take_equally_long() -> None:
    costs = trained(local_s=1e-3, remote_s=5e-4, overhead_s=0.1)
    assert costs.local_prefill_threshold(0) == pytest.approx(200, abs=2)


@given(st.integers(0, 64))
def test_the_more_sequences_decode_the_less_is_computed_beside_them(num_decoding: int) -> None:
    costs = trained(local_s=1e-3, remote_s=5e-4, overhead_s=0.1)
    threshold = costs.local_prefill_threshold(num_decoding)
    assert costs.local_prefill_threshold(num_decoding + 1) <= threshold
    assert costs.max_prefill_tokens(num_decoding + 1, 2048) <= 2048


def test_a_worker_that_is_faster_than_the_prefill_tier_computes_all_it_may() -> None:
    assert trained(local_s=1e-4, remote_s=5e-4, overhead_s=0.1).local_prefill_threshold(0) == 2048


def test_before_anything_is_known_and_when_it_is_pinned_the_threshold_is_the_default() -> None:
    assert Costs(POLICY, 128).local_prefill_threshold(3) == 16
    pinned = LocalPrefillPolicy(7, 7, is_pinned=True, gap_rule=KeepPercentile(2.0))
    costs = trained(local_s=1e-4, remote_s=5e-4, overhead_s=0.1, policy=pinned)
    assert costs.local_prefill_threshold(0) == 7


def test_a_chunk_beside_decoding_sequences_fits_into_the_time_that_is_allowed() -> None:
    costs = trained(local_s=1e-4, remote_s=5e-4, overhead_s=0.1)
    num_tokens = costs.max_prefill_tokens(4, 2048)
    # Steps take 10 ms, all of them: so one may take 12.
    assert num_tokens * 1e-4 == pytest.approx(0.002, rel=0.3)
    assert costs.max_prefill_tokens(0, 2048) == 2048
    for _ in range(5):
        costs.observe_gaps(64, 0, 0.1)  # some take ten times as long
    assert costs.max_prefill_tokens(4, 2048) * 1e-4 <= 0.01, "a step of these never twice as long"


def test_a_whole_chunk_is_computed_now_and_then_and_only_if_a_prompt_needs_it() -> None:
    costs = trained(local_s=1e-4, remote_s=5e-4, overhead_s=0.1)
    for _ in range(400):
        costs.observe_gaps(4, 0, 0.01)
    num_short = costs.max_prefill_tokens(4, 2048, num_wanted=8)
    assert costs.max_prefill_tokens(4, 2048, num_wanted=900) == 2048
    costs.observe_gaps(4, 900, 0.1)
    assert costs.max_prefill_tokens(4, 2048, num_wanted=900) <= 2 * num_short


def test_the_speed_at_prompts_is_that_of_the_worker_as_it_is_now() -> None:
    costs = Costs(POLICY, 128)
    assert costs.prefill_tokens_per_s(0, 2048) == 0
    costs = trained(local_s=1e-4, remote_s=5e-4, overhead_s=0.1)
    assert costs.prefill_tokens_per_s(0, 2048) == pytest.approx(10_000, rel=0.01)
    assert costs.prefill_tokens_per_s(4, 2048) < 5_000
    for _ in range(10):
        costs.observe_gaps(4, 20, 0.02)
    assert costs.prefill_tokens_per_s(4, 2048) == pytest.approx(1000, rel=0.01)


def test_short_prompts_whose_times_say_nothing_of_a_token_bound_the_next_chunk_all_the_same() -> (
    None
):
    costs = Costs(POLICY, 128)
    for num_tokens, seconds in ((8, 0.013), (9, 0.012), (10, 0.011)):
        costs.observe_step(4, 0, 0.01)
        costs.observe_step(4, num_tokens, seconds)
    assert 8 <= costs.max_prefill_tokens(4, 2048) <= 0.01 / (0.001 / 10)


def test_a_prompt_goes_on_however_little_time_there_is() -> None:
    assert trained(local_s=1.0, remote_s=5e-4, overhead_s=0.1).max_prefill_tokens(4, 2048) == 8
    assert trained(local_s=1.0, remote_s=5e-4, overhead_s=0.1).max_prefill_tokens(4, 4) == 4


def test_where_nothing_is_asked_of_the_next_tokens_a_prompt_takes_the_whole_step() -> None:
    policy = LocalPrefillPolicy(16, 2048, is_pinned=True, gap_rule=None)
    costs = trained(local_s=1e-4, remote_s=5e-4, overhead_s=0.1, policy=policy)
    assert costs.max_prefill_tokens(4, 2048) == 2048


def test_kv_is_swapped_when_copying_takes_less_time_than_computing() -> None:
    costs = trained(local_s=1e-3, remote_s=1e-3, overhead_s=0.1)
    costs.copy.observe(10_000_000, 0.01)  # 1 GB/s
    assert costs.is_swap_cheaper(num_bytes=10_000_000, num_tokens=100)  # 20 ms against 200
    assert not costs.is_swap_cheaper(num_bytes=1_000_000_000, num_tokens=100)  # 2 s against 0.2


@given(st.lists(st.integers(1, 40), min_size=8, max_size=40).filter(lambda ns: len(set(ns)) > 1))
def test_a_worker_that_has_prompts_in_every_step_learns_what_decoding_takes(
    numbers: list[int],
) -> None:
    """Else it publishes no cost of decoding, and a planner never sees one."""
    costs = Costs(POLICY, token_bytes=100)
    for num_tokens in (2048, 1000, 2048, 500):
        costs.observe_step(0, num_tokens, 0.008 + 5e-5 * num_tokens)
    for number in numbers:
        costs.observe_step(number, 400, 0.008 + 1e-4 * number + 5e-5 * 400)
    published = costs.of_steps()
    assert published.step_s + 20 * published.sequence_s == pytest.approx(0.010, rel=0.1)


def test_a_step_in_which_the_machine_stood_still_is_no_cost_of_a_sequence() -> None:
    costs = Costs(POLICY, 64)
    for number in [1, 2, 1, 3, 2] * 40:
        costs.observe_step(number, 0, 0.020 + 0.0002 * number)
    costs.observe_step(4, 0, 2.0)
    assert costs.of_steps().sequence_s < 0.002


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_prompts_fill_to_one_length_teach_what_prompts_and_decoding_take(
    seed: int,
) -> None:
    """Each chunk follows from what was learned, so that a wrong cost would confirm itself."""
    rng = random.Random(seed)
    costs = Costs(gap_policy(Slo(3.0, 0.03)), token_bytes=100)
    running: list[int] = []
    prompts = [rng.randint(20, 2000)]
    for _ in range(400):
        pace = Pace(0.027 * rng.uniform(0.8, 1.2), 100, 0.027)
        left = num_tokens = costs.max_prefill_tokens(len(running), 2048, 2048, [pace])
        decode_s = 0.0085 + 1.2e-4 * len(running) if running else 0.0
        costs.observe_step(len(running), num_tokens, (decode_s or 0.0085) + 5e-5 * num_tokens)
        running = [number - 1 for number in running if number > 1]
        while left >= prompts[0]:
            left -= prompts.pop()
            running.append(rng.randint(10, 400))
            prompts.append(rng.randint(20, 2000))
        prompts[0] -= left
    published = costs.of_steps()
    assert published.step_s + 30 * published.sequence_s == pytest.approx(0.0121, rel=0.1)
    assert published.token_s == pytest.approx(5e-5, rel=0.1)


def gap_policy(slo: Slo) -> LocalPrefillPolicy:
    return LocalPrefillPolicy(
        16,
        2048,
        is_pinned=True,
        gap_rule=gap_rule_of(slo, KeepPercentile(2.0)),
        max_shared_tokens=2048,
    )
