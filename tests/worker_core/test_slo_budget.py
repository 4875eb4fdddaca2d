"""How much of a prompt a step may compute where a mean gap is the target."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import Slo
from worker_core.costs import Costs
from worker_core.gap_rule import Pace
from worker_core.policy import BALANCED, gap_rule_of, kept_tpot_s, pinned_local_prefill
from worker_core.slo_budget import MAX_GAP_FACTOR, TARGET_SHARE, KeepTarget

TPOT_S = 0.05
STEP_S = st.floats(0.001, 0.04)
#: Some sequences of classes with targets of their own.
KEPT_S = st.sampled_from([TARGET_SHARE * TPOT_S, 0.6 * TPOT_S, 3 * TPOT_S])
PACES = st.lists(st.builds(Pace, st.floats(0.0, 2.0), st.integers(0, 100), KEPT_S), max_size=8)


@given(STEP_S, PACES)
def test_no_sequence_that_can_keep_its_target_gets_its_token_late(
    step_s: float, paces: list[Pace]
) -> None:
    spare_s = KeepTarget.of_tpot(TPOT_S).new_budget().spare_s(step_s, paces)
    assert 0 <= spare_s <= MAX_GAP_FACTOR * TPOT_S - step_s
    able = [p.due_s for p in paces if step_s <= p.due_s + p.num_left * (p.tpot_s - step_s)]
    if spare_s:
        assert all(step_s + spare_s <= due_s + 1e-9 for due_s in able)
    else:
        assert min(able) <= step_s


@given(STEP_S, st.integers(2, 40))
def test_sequences_keep_their_mean_gap_whatever_prompts_wait(step_s: float, num: int) -> None:
    """A decoding sequence beside prompts without end, each step as long as it may be."""
    rule = KeepTarget.of_tpot(TPOT_S)
    budget, now_s = rule.new_budget(), 0.0
    assert rule.tpot_s is not None
    for n in range(1, num + 1):
        pace = Pace(rule.tpot_s * n - now_s, num - n, rule.tpot_s)
        now_s += step_s + budget.spare_s(step_s, [pace])
    assert now_s / num <= TPOT_S
    assert now_s / num >= min(0.8 * TPOT_S, step_s), "time is not left unused"


@given(st.floats(0.001, 0.02), st.integers(2, 40))
def test_each_of_two_classes_keeps_its_own_mean_gap(step_s: float, num: int) -> None:
    """A prompt gets what the tight one leaves; once that has ended, what the loose one leaves."""
    budget, now_s = KeepTarget.of_tpot(TPOT_S).new_budget(), 0.0
    tight_s = kept_tpot_s(TARGET_SHARE * TPOT_S, Slo(tpot_s=0.03))
    loose_s = kept_tpot_s(TARGET_SHARE * TPOT_S, Slo(tpot_s=0.12))
    for n in range(1, 2 * num + 1):
        paces = [Pace(loose_s * n - now_s, 2 * num - n, loose_s)]
        if n <= num:
            paces.append(Pace(tight_s * n - now_s, num - n, tight_s))
        now_s += step_s + budget.spare_s(step_s, paces)
        if n == num:
            assert 0.8 * 0.03 <= now_s / num <= 0.03
    assert 0.1 <= now_s / num / 2 <= 0.12
    assert kept_tpot_s(0.045, None) == kept_tpot_s(0.045, Slo(ttft_s=1.0)) == 0.045


def test_a_target_that_steps_alone_miss_leaves_prompts_half_of_the_time() -> None:
    budget = KeepTarget.of_tpot(0.01).new_budget()
    assert budget.spare_s(0.02, [Pace(0.0, 10, TPOT_S)]) == 0.02


def test_a_sequence_that_is_lost_holds_up_no_prompt() -> None:
    budget = KeepTarget.of_tpot(TPOT_S).new_budget()
    lost, well = Pace(-5.0, 3, TPOT_S), Pace(0.1, 3, TPOT_S)
    assert budget.spare_s(0.01, [lost, well]) == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("slo", "rule"),
    [
        (Slo(), BALANCED),
        (Slo(ttft_s=0.3), KeepTarget(None, 0.3)),
        (Slo(tpot_s=0.1), KeepTarget.of_tpot(0.1)),
        (Slo(0.3, 0.1), KeepTarget.of_tpot(0.1)),
    ],
)
def test_the_targets_choose_the_rule(slo: Slo, rule: object) -> None:
    assert gap_rule_of(slo, BALANCED) == rule


def test_chunks_follow_from_measured_speed_and_the_tightest_pace() -> None:
    costs = Costs(pinned_local_prefill(4096, KeepTarget.of_tpot(TPOT_S)), 128)
    for num_tokens in (100, 200, 300, 400):
        costs.observe_step(4, 0, 0.01)
        costs.observe_step(0, num_tokens, 1e-3 * num_tokens)
    paces = (Pace(0.06, 50, TPOT_S), Pace(0.5, 50, TPOT_S))
    assert costs.max_prefill_tokens(4, 2048, 1000, paces) == pytest.approx(50, abs=1)
    assert costs.max_prefill_tokens(4, 2048, 1000) == pytest.approx(190, abs=1)
    assert costs.prefill_tokens_per_s(4, 2048) == pytest.approx(35 / 0.045, rel=0.05)
