"""The planner finds the shape that suits the targets, and stays with it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import Role, Slo, StepCosts, Tier
from gateway.routing.planner.planner import REST_S, LoadLog, Planner, _thinned, _tokens_left
from gateway.routing.planner.replay import (
    Demand,
    Load,
    Model,
    _Decoding,
    _Replay,
    _Request,
    score,
)
from gateway.routing.planner.shapes import WorkerFacts
from gateway.routing.ways import LATE_EVERY

#: As measured on a machine whose load varies.
ONE_CORE = StepCosts(0.0115, 0.0010, 0.005, 0.0009)
SPLIT = [
    WorkerFacts("h:1", "h", Tier.PREFILL, Role(Tier.PREFILL), 1),
    WorkerFacts("h:2", "h", Tier.DECODE, Role(Tier.DECODE), 1),
]
COLOCATED = {"h:1": Role(Tier.PREFILL), "h:2": Role(Tier.DECODE, True, 2)}
SOON, SMOOTH = Slo(0.6, 0.2), Slo(3.0, 0.03)


def demands(rate: float, seed: int = 0, num_requests: int = 40) -> Load:
    rng, at_s, made = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        at_s += rng.expovariate(rate)
        made.append(Demand(at_s, rng.randint(256, 1024), rng.randint(32, 64)))
    return Load(made)


def decided(planner: Planner, slo_rate: float, workers: list[WorkerFacts]) -> Mapping[str, Role]:
    planner.observe([(1, ONE_CORE)])
    return planner.decide(100.0, workers, demands(slo_rate, seed=2)).roles


def test_early_first_tokens_are_served_colocated_and_short_gaps_by_a_split() -> None:
    """On one host, as bench.slo measures; the colocated worker gets both cores."""
    assert decided(Planner(SOON), 2.0, SPLIT) == COLOCATED
    assert decided(Planner(SMOOTH), 4.0, SPLIT) == {w.address: w.role for w in SPLIT}
    joined = [replace(worker, role=COLOCATED[worker.address]) for worker in SPLIT]
    assert decided(Planner(SMOOTH), 4.0, joined) == {w.address: w.role for w in SPLIT}


def test_a_fleet_gets_prefill_workers_by_how_long_prompts_are() -> None:
    def num_prefill(num_prompt: int, num_output: int) -> int:
        workers = [WorkerFacts(f"w{i}", f"w{i}", Tier.DECODE, Role(Tier.DECODE)) for i in range(8)]
        planner = Planner(Slo(1.0, 0.015))
        planner.observe([(0, StepCosts(0.010, 0.0005, 0.0, 0.0004))])
        load = Load([Demand(i * 0.12, num_prompt, num_output) for i in range(48)])
        roles = planner.decide(100.0, workers, load).roles
        return sum(role.tier is Tier.PREFILL for role in roles.values())

    assert num_prefill(1024, 16) > num_prefill(128, 128)


@pytest.mark.parametrize("num_workers", [2, 3, 8, 9, 20, 37, 1000])
def test_a_fleet_of_any_size_is_planned(num_workers: int) -> None:
    """Larger ones are replayed by a few workers, among them one of each role."""
    facts = [WorkerFacts(f"w{i}", f"w{i}", Tier.DECODE, Role(Tier.DECODE)) for i in range(1000)]
    planner = Planner(Slo(1.0, 0.015))
    planner.observe([(0, StepCosts(0.010, 0.0005, 0.0, 0.0004))])
    load = Load([Demand(i * 0.96 / num_workers, 512, 400) for i in range(48)])
    roles = planner.decide(100.0, facts[:num_workers], load).roles
    num_prefill = sum(role.tier is Tier.PREFILL for role in roles.values())
    assert 0.2 <= num_prefill / num_workers <= 0.6


def test_nothing_changes_without_knowledge_or_soon_again() -> None:
    planner = Planner(SOON)
    present = {worker.address: worker.role for worker in SPLIT}
    assert not planner.decide(0.0, [], None).roles, "nobody has joined"
    assert planner.decide(0.0, SPLIT, demands(2.0)).roles == present, "no costs"
    planner.observe([(1, ONE_CORE)])
    assert planner.decide(0.0, SPLIT, None).roles == present, "no requests"
    assert not planner.decide(0.0, SPLIT[1:], demands(2.0)).roles, "alone"
    assert planner.decide(100.0, SPLIT, demands(2.0)).roles == COLOCATED
    # The first worker is slow with both cores: but the shape rests.
    planner.observe([(2, StepCosts(0.5, 0.5, 0.0, 0.01))])
    assert planner.decide(100.0 + REST_S / 2, SPLIT, demands(2.0)).roles == COLOCATED
    assert planner.decide(100.0 + REST_S, SPLIT, demands(2.0)).roles == present, (
        "what is measured counts"
    )


@pytest.mark.parametrize("slo", [SOON, SMOOTH, Slo(1.2, 0.05)])
def test_a_steady_load_moves_roles_seldom(slo: Slo) -> None:
    """Ten minutes of samples that differ: each alone has another best shape."""
    planner, workers, num_changes = Planner(slo), SPLIT, 0
    planner.observe([(1, ONE_CORE)])
    for tick in range(30):
        roles = planner.decide(20.0 * tick, workers, demands(2.0, seed=tick % 3)).roles
        moved = [replace(worker, role=roles[worker.address]) for worker in workers]
        num_changes += moved != workers
        workers = moved
    assert num_changes <= 2


def test_a_shape_that_serves_all_is_replayed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each shape has a score; and with the others again when it serves fewer."""
    replayed: list[int] = []

    def count(workers: Sequence[Model], load: Load, slo: Slo) -> float:
        replayed.append(len(load.latest))
        return score(workers, load, slo)

    monkeypatch.setattr("gateway.routing.planner.planner.score", count)
    workers = [WorkerFacts(f"w{i}", f"w{i}", Tier.DECODE, Role(Tier.DECODE, True)) for i in "abc"]
    planner = Planner(Slo(3.0, 1.0))
    planner.observe([(0, ONE_CORE)])
    numbers = []
    for tick, rate in enumerate([0.1, 0.1, 0.1, 50.0]):
        planner.decide(100.0 * tick, workers, demands(rate))
        numbers.append(len(replayed))
        replayed.clear()
    assert numbers == [3, 1, 1, 3]


def test_another_leader_goes_on_with_the_shape_that_it_finds() -> None:
    joined = [replace(worker, role=COLOCATED[worker.address]) for worker in SPLIT]
    assert Planner(SOON).decide(0.0, joined, None).roles == COLOCATED


def test_a_leader_that_finds_a_mixture_moves_as_few_as_serve_as_well() -> None:
    roles = [Role(Tier.PREFILL)] * 3 + [Role(Tier.DECODE)] * 4 + [Role(Tier.DECODE, True)]
    workers = [WorkerFacts(f"w{i}", f"w{i}", role.tier, role) for i, role in enumerate(roles)]
    planner = Planner(Slo(10.0, 1.0))
    planner.observe([(0, ONE_CORE)])
    light = Load([Demand(float(i), 10, 10) for i in range(10)])
    decided = planner.decide(100.0, workers, light).roles
    assert [decided[worker.address] for worker in workers] == [*roles[:7], Role(Tier.DECODE)]


def test_a_log_keeps_the_latest_and_takes_unknown_answers_to_be_usual() -> None:
    log = LoadLog()
    for number in range(600):
        log.on_arrival(f"r{number}", float(number), 100)
        log.on_placed(f"r{number}", 30)
        if number < 599:
            log.on_ended(f"r{number}", 20)
    latest = latest_of(log)
    assert len(latest) < 300
    assert latest[0].at_s == 0.0
    assert {demand.num_prompt for demand in latest} == {30}
    assert latest[-1].num_output == 20
    assert latest_of(log, 0.5)[-1].at_s == latest[-1].at_s / 2, "two gateways see twice as much"
    log.on_arrival("r590", 600.0, 100)
    arrivals = [demand.at_s for demand in latest_of(log)]
    assert arrivals == sorted(arrivals), "a name that comes again is a later request"
    few = LoadLog()
    few.on_arrival("r", 0.0, 100)
    few.on_ended("r", 5)
    assert few.load(0.0) is None


def latest_of(log: LoadLog, share: float = 1.0) -> Sequence[Demand]:
    load = log.load(600.0, share)
    assert load is not None
    return load.latest


def test_a_log_has_what_waits_and_since_when() -> None:
    log = LoadLog(lambda: ["r18", "r15", "another"])
    for number in range(20):
        log.on_arrival(f"r{number}", float(number), 100 + number)
        if number < 10:
            log.on_ended(f"r{number}", 20)
    load, twice = log.load(20.0), log.load(20.0, 0.5)
    assert load is not None
    assert twice is not None
    assert load.waiting == [Demand(-5.0, 115, 20), Demand(-2.0, 118, 20)]
    assert twice.waiting == [demand for demand in load.waiting for _ in range(2)]


def test_a_replay_counts_what_is_inside_the_targets() -> None:
    worker = Model(StepCosts(0.01, 0.0, 0.0, 0.001), False, True, True)
    one = Load([Demand(0.0, 100, 11)])
    assert score([worker], one, Slo(0.2, 0.02)) == pytest.approx(1.1), "0.11 s, 10 ms"
    assert score([worker], one, Slo(0.1, 0.02)) < 0.1
    assert score([worker], one, Slo(None, 0.005)) < 0.1
    both = Load([Demand(0.0, 100, 11), Demand(0.0, 100, 11)])
    assert 0.5 < score([worker], both, Slo(0.15)) < 0.6, "the second waits"
    pair = [Model(worker.costs, True, False), Model(worker.costs, False, True)]
    assert score(pair, one, Slo(0.2, 0.02)) == pytest.approx(1.1)


def test_a_replay_begins_with_what_waits_and_runs() -> None:
    worker = Model(StepCosts(0.01, 0.001, 0.0, 0.001), False, True, True)
    slo = Slo(0.3, 0.03)
    coming = [Demand(0.001, 100, 11)]
    assert score([worker], Load(coming), slo) == pytest.approx(1.1)
    assert score([worker], Load(coming, [Demand(-0.1, 100, 11)]), slo) == pytest.approx(1.1)
    behind = score([worker], Load(coming, [Demand(-0.25, 100, 11)]), slo)
    assert 0.5 < behind < 0.6, "it has waited for too long"
    assert score([worker], Load(coming, running=[200] * 15), slo) < 0.1, "15 that decode go first"


def test_a_late_request_gets_one_place_of_so_many_in_a_replay() -> None:
    worker = Model(StepCosts(0.01, 0.001, 0.0, 0.001), False, True, True)
    on_time = [Demand(0.001 * i - 1.0, 2000, 1) for i in range(2 * LATE_EVERY)]
    too_long = Demand(-0.9, 95_000, 1)
    requests = _Replay([worker], Slo(100.0)).run(Load([], [*on_time[:5], too_long, *on_time[5:]]))
    late = requests.pop(5)
    assert sum(request.first_s < late.first_s for request in requests) == LATE_EVERY - 1


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)))),
        max_size=6,
    )
)
def test_sequences_that_decode_together_end_and_are_due_as_each_alone(
    rounds: list[tuple[int, list[tuple[int, int]]]],
) -> None:
    """Steps, and sequences that come before them: (tokens left, seconds until the next is due)."""
    decoding, now_s = _Decoding(2.0), 0.0
    running: list[tuple[_Request, int, float]] = []
    for number, coming in rounds:
        for num_left, in_s in coming:
            request = _Request(Demand(0.0, 1, num_left + 1), 0)
            decoding.add(request, num_left, now_s + in_s)
            running.append((request, num_left, now_s + in_s))
        paces = [(pace.due_s, pace.num_left) for pace in decoding.paces(now_s)]
        assert sorted(paces) == sorted((due_s - now_s, left) for _, left, due_s in running)
        assert [due_s for due_s, _ in paces] == sorted(due_s for due_s, _ in paces)
        if running:
            assert decoding.num_steps == min(left for _, left, _ in running)
        now_s += number
        decoding.step(number, now_s)
        assert all(request.end_s == now_s for request, left, _ in running if left <= number)
        running = [(r, left - number, due_s + 2.0 * number) for r, left, due_s in running]
        running = [each for each in running if each[1] > 0]
        assert all(request.end_s == math.inf for request, *_ in running)
        assert len(decoding) == len(running)


def test_a_part_of_a_fleet_is_shown_its_part_of_the_load() -> None:
    load = Load(
        [Demand(10.0 + i, 1, 1) for i in range(20)],
        [Demand(i - 40.0, 1, 1) for i in range(40)],
        [*range(40)],
    )
    shown = _thinned(load, 8, 0.25)
    assert [demand.at_s for demand in shown.latest] == [4.0 * i for i in range(8)]
    assert [demand.at_s for demand in shown.waiting] == [-30.0 + 4 * i for i in range(8)]
    assert shown.running == [2 + 4 * i for i in range(10)]


@given(st.lists(st.integers(1, 500), min_size=8, max_size=40), st.integers(0, 300))
def test_tokens_left_are_those_of_answers_found_running(outputs: list[int], number: int) -> None:
    """Each answer is found running in proportion to its length."""
    left = _tokens_left([Demand(0.0, 1, output) for output in outputs], number)
    assert len(left) == number
    assert all(1 <= tokens <= max(outputs) for tokens in left)
    if number:
        mean = sum(n * n for n in outputs) / sum(outputs) / 2
        spacing = sum(outputs) / number
        assert abs(sum(left) / number - mean) <= spacing + 1


def test_costs_that_no_step_can_have_are_ignored() -> None:
    planner = Planner(Slo(10.0, 1.0))
    strange = (math.nan, math.inf, -1.0)
    planner.observe([(0, ONE_CORE), *((0, StepCosts(s, s, s, s)) for s in strange)])
    light = Load([Demand(float(i), 10, 10) for i in range(10)])
    workers = [WorkerFacts(f"w{i}", f"w{i}", Tier.DECODE, Role(Tier.DECODE)) for i in range(3)]
    assert planner.decide(100.0, workers, light).roles
