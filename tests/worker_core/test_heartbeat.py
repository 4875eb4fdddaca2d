"""How long an engine loop's silence may last: no worker at work is ever given up, and one that
stands still is."""

from __future__ import annotations

import csv
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from worker_core.loop import FIRST_STEP_S, MARGIN, SPAN_S, Heartbeat, SilenceBound

LEAST_S = 1.5

#: Heartbeat gaps of a prefill and a decode worker with a model of 6 million parameters on a busy
#: CPU, in order.
RECORDED = Path(__file__).with_name("beat_gaps.csv")

Steps = st.lists(st.tuples(st.integers(1, 16384), st.floats(1.0, MARGIN)), min_size=1, max_size=60)


def recorded(tier: str) -> list[tuple[int, float]]:
    with RECORDED.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["tier"] == tier]
    return [(int(row["num_tokens"]), float(row["silence_ms"]) / 1e3) for row in rows]


@given(
    fixed_s=st.floats(0.0, 2.0), per_token_s=st.floats(0.0, 3.0), steps=Steps, scale=st.floats(0, 1)
)
def test_a_worker_at_work_is_never_given_up(
    fixed_s: float, per_token_s: float, steps: list[tuple[int, float]], scale: float
) -> None:
    """However slow it is, however its steps' sizes jump, and though others disturb it MARGIN
    times."""
    bound = SilenceBound(LEAST_S)
    # The first step of all, which tells how fast the worker is, ends in time.
    first_tokens, first_noise = steps[0]
    first_s = FIRST_STEP_S * scale
    speed = first_s / max(1e-9, (fixed_s + per_token_s * first_tokens) * first_noise)
    for num_tokens, noise in steps:
        silence_s = (fixed_s + per_token_s * num_tokens) * noise * speed
        assert silence_s <= bound.bound_s(num_tokens) * (1 + 1e-9)
        bound.observe(num_tokens, silence_s)


@given(steps=st.lists(st.tuples(st.integers(0, 4096), st.floats(0.0, LEAST_S / MARGIN))))
def test_one_with_short_steps_is_given_up_after_the_least_silence(
    steps: list[tuple[int, float]],
) -> None:
    bound = SilenceBound(LEAST_S)
    for num_tokens, silence_s in steps:
        bound.observe(num_tokens, silence_s)
    assert bound.bound_s(max((num_tokens for num_tokens, _ in steps), default=0)) == LEAST_S


def test_real_workers_keep_the_least_bound_and_never_reach_it() -> None:
    for tier in ("prefill", "decode"):
        bound = SilenceBound(LEAST_S)
        silences = recorded(tier)
        bound.observe(*silences[0])
        for num_tokens, silence_s in silences[1:]:
            assert silence_s < bound.bound_s(num_tokens)
            bound.observe(num_tokens, silence_s)
        assert bound.bound_s(max(num_tokens for num_tokens, _ in silences)) == LEAST_S


def test_a_slow_past_is_forgotten_but_not_by_idling() -> None:
    bound = SilenceBound(LEAST_S)
    bound.observe(512, 10.0)
    for _ in range(10_000):
        bound.observe(0, 0.2)
    assert bound.bound_s(512) == MARGIN * 10.0
    for _ in range(int(2 * SPAN_S / 0.1) + 2):
        bound.observe(512, 0.1)
    assert bound.bound_s(512) == LEAST_S


def test_a_heartbeat_knows_the_step_that_goes_on() -> None:
    now_s = [0.0]
    heartbeat = Heartbeat(LEAST_S, lambda: now_s[0])
    assert heartbeat.max_age_s == LEAST_S
    heartbeat.beat(100)
    assert heartbeat.max_age_s == FIRST_STEP_S
    now_s[0] = 2.0
    assert heartbeat.age_s == 2.0
    heartbeat.beat()
    assert heartbeat.age_s == 0.0
    heartbeat.beat(300)
    assert heartbeat.max_age_s == MARGIN * 2.0 * 3
