"""As few workers as serve as well as the most do: more at once, fewer slowly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import Role, Slo, StepCosts, Tier
from gateway.routing.planner.planner import Planner
from gateway.routing.planner.replay import Demand, Load
from gateway.routing.planner.shapes import Shape, WorkerFacts
from gateway.routing.planner.size import MARGIN, SPARE_S, Bounds, Size, enough, num_going

COSTS = StepCosts(0.010, 0.0005, 0.0, 0.0004)
SLO = Slo(1.0, 0.03)


@given(
    st.lists(st.floats(0, 1.1), min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(1, 50),
)
def test_the_least_number_above_the_present_scores_as_the_most_does(
    scores: list[float], least: int, present: int
) -> None:
    scores.sort()
    bounds = Bounds(min(least, len(scores)), len(scores))
    asked = []

    def score_of(number: int) -> float:
        asked.append(number)
        return scores[number - 1]

    number, clipped = enough(score_of, present, bounds), bounds.clip(present)
    assert bounds.least <= number <= bounds.most
    assert scores[number - 1] >= scores[-1] - MARGIN
    if number > clipped:
        assert scores[number - 2] < scores[-1] - MARGIN, "one fewer were enough"
    else:
        assert number >= clipped - num_going(clipped), "no more go at a time"
    assert len(set(asked)) <= 2 + len(scores).bit_length(), "by bisection"


def test_more_are_said_at_once_and_fewer_only_after_they_were_spare_for_long() -> None:
    size = Size(Bounds(1, 8))
    assert size.said is None
    assert size.num_spare(0.0, 2, 6) == 0
    assert size.said == 6
    assert size.num_spare(1.0, 2, 3) == 0, "of these that come only one goes"
    assert size.num_spare(1.0 + SPARE_S / 2, 4, 6) == 0
    assert size.num_spare(2.0 + SPARE_S, 6, 3) == 0, "they were needed in between"
    assert size.num_spare(1.0 + 2 * SPARE_S, 6, 3) == 0
    assert size.num_spare(2.0 + 2 * SPARE_S, 6, 3) == 1
    size.shrink(6, 1)
    assert size.said == 5
    assert size.num_spare(3.0 + 2 * SPARE_S, 6, 3) == 0, "the next one as slowly"


def test_workers_that_take_long_to_start_are_let_go_later() -> None:
    size = Size(Bounds(1, 8))
    size.num_spare(0.0, 2, 3)
    size.on_workers(100.0, 3)
    assert size.num_spare(200.0, 3, 2) == 0
    assert size.num_spare(201.0 + SPARE_S, 3, 2) == 0
    assert size.num_spare(700.0, 3, 2) == 1


def test_time_in_which_another_led_is_no_time_in_which_workers_were_spare() -> None:
    size = Size(Bounds(1, 8))
    size.num_spare(0.0, 4, 3)
    size.pause()
    assert size.num_spare(10 * SPARE_S, 4, 3) == 0
    size.lead(7)
    assert size.said == 7, "what the leader before has said"
    assert size.num_spare(20 * SPARE_S, 4, 3) == 0


def fleet(num_workers: int, num_decode: int = 1) -> list[WorkerFacts]:
    """Workers of hosts of their own, busy."""
    tiers = [Tier.DECODE] * num_decode + [Tier.PREFILL] * (num_workers - num_decode)
    return [
        WorkerFacts(f"w{i}:1", f"w{i}", tier, Role(tier), num_sequences=1)
        for i, tier in enumerate(tiers)
    ]


def load(rate: float, num_requests: int = 96) -> Load:
    return Load([Demand(i / rate, 1024, 64) for i in range(num_requests)])


def planner_of(bounds: Bounds | None) -> Planner:
    planner = Planner(SLO, bounds)
    planner.observe([(0, COSTS)])
    return planner


def test_the_number_follows_the_load_within_its_bounds() -> None:
    def number(rate: float, bounds: Bounds) -> int:
        return planner_of(bounds).decide(0.0, fleet(2), load(rate)).num_workers or 2

    numbers = [number(rate, Bounds(1, 8)) for rate in (1.0, 3.0, 6.0, 12.0)]
    assert numbers == sorted(numbers)
    assert numbers[0] == 2
    assert 3 <= numbers[-1] <= 8
    assert number(12.0, Bounds(1, 3)) == 3
    assert number(1.0, Bounds(4, 8)) == 4
    assert planner_of(None).decide(0.0, fleet(2), load(12.0)).num_workers is None


@pytest.mark.parametrize("idle", [True, False])
def test_fewer_are_said_only_once_so_many_decode_that_one_is_left(idle: bool) -> None:
    planner, workers, now_s = planner_of(Bounds(2, 8)), fleet(3), 0.0
    requests = None if idle else load(1.0)
    if idle:
        workers = [replace(worker, num_sequences=0) for worker in workers]
    for _ in range(30):
        now_s += 4.0
        decision = planner.decide(now_s, workers, requests)
        assert decision.num_workers in (None, 2)
        if decision.num_workers == 2:
            break
        # The first orders are lost.
        if now_s > SPARE_S + 20.0:
            workers = [replace(w, role=decision.roles[w.address]) for w in workers]
    assert decision.num_workers == 2
    assert sum(worker.role.tier is Tier.DECODE for worker in workers) > 1
    tiers = [decision.roles[worker.address].tier for worker in workers]
    assert tiers.count(Tier.DECODE) > 1, "until one has left"
    assert planner.decide(now_s + 1.0, workers[1:], requests).num_workers == 2


def test_workers_that_run_long_answers_are_no_spare_ones() -> None:
    planner = planner_of(Bounds(1, 8))
    planner.decide(0.0, fleet(4, 2), load(1.0))
    for number in range(40):
        decision = planner.decide(5.0 * number, fleet(4, 2), None)
        assert decision.num_workers is None


def test_nothing_is_said_before_costs_are_known() -> None:
    planner = Planner(SLO, Bounds(1, 8))
    for number in range(40):
        assert planner.decide(5.0 * number, fleet(4, 2), load(12.0)).num_workers is None


def test_when_no_worker_decodes_one_gets_that_role_at_once() -> None:
    planner = planner_of(None)
    planner.decide(0.0, fleet(4, 2), load(3.0))
    left = [replace(w, role=Role(Tier.PREFILL)) for w in fleet(3)]
    for requests in (None, load(3.0)):
        roles = planner.decide(1.0, left, requests).roles.values()
        assert any(role.tier is Tier.DECODE for role in roles)
    alone = planner.decide(2.0, left[:1], None).roles
    assert [*alone.values()] == [Role(Tier.DECODE, is_colocated=True)]


def test_scores_are_kept_when_workers_come_and_go() -> None:
    """A worker that comes and goes brings no new start, so that single samples do not move
    roles."""
    planner = planner_of(None)
    planner.decide(0.0, fleet(4), load(0.5))
    known = dict(planner._scores)
    assert len(known) == 4
    planner._slo = Slo(0.001, 0.001)
    planner._best([*fleet(4), *fleet(5, 5)[4:]], load(0.5), Shape(4))
    assert len(planner._scores) == 5
    for share, score in planner._scores.items():
        nearest = min((s for s in known if bool(s) is bool(share)), key=lambda s: abs(s - share))
        assert abs(score - known[nearest]) <= 0.3 * 1.1 + 1e-9
