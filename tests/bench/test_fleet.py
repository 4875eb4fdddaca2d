"""The simulated fleet: as the real cores, whatever it serves is served once, and it repeats."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.types import Slo, StepCosts
from bench.fleet.__main__ import Cell, Fleet, gains, markdown
from bench.fleet.cache import Blocks
from bench.fleet.contenders import colocated, families, planned, split
from bench.fleet.day import in_a_wave
from bench.fleet.failures import Failure, GatewaysLost, RegistryAway, WorkersLost
from bench.fleet.gateways import Registry
from bench.fleet.runs import Figures, Run, figures_of, hits, load_in_turn, load_of
from bench.fleet.validation import deviations
from bench.fleet.worker import Hardware
from engine.plan.trace import TraceEntry
from tests.support.virtual_loop import run_virtual
from worker_core.policy import decode_policy, pinned_local_prefill

HARDWARE = Hardware(StepCosts(0.008, 0.0001, 0.008, 0.0001), num_blocks=4000)
SLO = Slo(2.0, 0.03)
TRACE = [TraceEntry(i * 0.3, 1500, 20 + i % 30, (i % 5, 100 + i, 200 + i)) for i in range(60)]


@pytest.mark.slow
def test_simulated_workers_take_as_long_as_whole_cores() -> None:
    for deviation in deviations(num_requests=40):
        assert deviation.worst < 0.1, deviation


@pytest.mark.slow
def test_every_contender_serves_all_and_a_run_repeats() -> None:
    for contender, shapes in families(HARDWARE, 3, SLO).items():
        for shape in shapes.values():
            run = Run(shape, HARDWARE, SLO, TRACE)
            figures = figures_of(run)
            assert figures.refused == 0.0
            assert figures.attainment > 0.5, contender
            assert 0.0 < figures.hit_share < 0.4
            assert replace(figures_of(run), cpu_s=0.0) == replace(figures, cpu_s=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("num_prefill", [0, 2])
def test_what_lost_workers_had_is_finished_by_others(num_prefill: int) -> None:
    """Losses of each worker at some time; of the handoff, each part."""
    apart = decode_policy(pinned_local_prefill(16))
    shape = split(num_prefill, 4, apart, SLO) if num_prefill else colocated(HARDWARE, 4, SLO)
    failures = [
        WorkersLost(at_s, 0.5, one_of=4, first=first)
        for first in range(4)
        for at_s in (2.0 + 1.13 * first, 9.0 + 1.13 * first)
    ]
    run = Run(shape, HARDWARE, SLO, TRACE, failures=failures)
    figures = figures_of(run)
    assert figures.num_requests == len(TRACE)
    assert figures.num_restarts > 0
    assert (figures.num_broken, figures.refused) == (0, 0.0)
    assert replace(figures_of(run), cpu_s=0.0) == replace(figures, cpu_s=0.0)
    assert figures.goodput <= figures_of(replace(run, failures=())).goodput


@pytest.mark.slow
@pytest.mark.parametrize("num_prefill", [0, 2])
def test_what_lost_gateways_had_goes_on_at_others_without_a_registry(num_prefill: int) -> None:
    """Losses of each gateway at some time, some while the registry is away, and of workers."""
    apart = decode_policy(pinned_local_prefill(16))
    shape = split(num_prefill, 4, apart, SLO) if num_prefill else planned(HARDWARE, 4, SLO)
    failures: list[Failure] = [
        GatewaysLost(1.0 + 0.57 * i, 1.5, one_of=3, first=i % 3) for i in range(24)
    ]
    failures += [RegistryAway(7.0, 5.0), WorkersLost(8.0, 0.5, one_of=4)]
    run = Run(shape, HARDWARE, SLO, TRACE, failures=failures, num_gateways=3)
    figures = figures_of(run)
    assert figures.num_requests == len(TRACE)
    assert figures.num_restarts > 10
    assert (figures.num_broken, figures.num_wrong, figures.refused) == (0, 0, 0.0)
    assert replace(figures_of(run), cpu_s=0.0) == replace(figures, cpu_s=0.0)


def test_one_gateway_leads_and_another_one_after_it() -> None:
    """Whoever holds the lease first has it while it renews it; nobody while the registry is
    away."""

    async def main() -> None:
        registry = Registry()
        first, second = registry.lease_of("g0"), registry.lease_of("g1")
        term = await first.hold()
        assert term is not None
        assert await second.hold() is None
        assert await first.record(7) == 7
        registry.is_away = True
        assert await first.hold() is None
        registry.is_away = False
        await asyncio.sleep(first.lasts_s / 2)
        assert await first.hold() == term
        await asyncio.sleep(first.lasts_s)
        later = await second.hold()
        assert later is not None
        assert later > term
        assert await first.hold() is None
        assert await second.record(None) == 7

    run_virtual(main())


def test_a_wave_keeps_requests_and_their_order_and_has_most_in_the_middle() -> None:
    entries = load_of(TRACE, 2.0, 600.0, seed=0)
    wave = in_a_wave(entries, 600.0)
    assert [e.hash_ids for e in wave] == [e.hash_ids for e in entries]
    times_s = [entry.arrival_s for entry in wave]
    assert times_s == sorted(times_s)
    assert times_s[0] >= 0.0
    assert times_s[-1] <= 600.0
    in_third = [sum(200 * i <= t < 200 * (i + 1) for t in times_s) for i in range(3)]
    assert in_third[1] > 2 * max(in_third[0], in_third[2])


def test_a_load_repeats_a_trace_with_new_prefixes_at_the_rate() -> None:
    load = load_of(TRACE, 2.0, 60.0, seed=0)
    assert len(load) == 120
    assert load[-1].arrival_s == pytest.approx(60.0, rel=0.05)
    assert sum(hits(load)) == 2 * sum(hits(TRACE))
    assert load_of(TRACE, 2.0, 60.0, seed=1)[0].num_output_tokens != load[0].num_output_tokens


def test_traces_in_turn_share_no_prefixes_and_one_that_comes_again_goes_on() -> None:
    other = [replace(entry, num_output_tokens=99) for entry in TRACE]
    load = load_in_turn([TRACE, other, TRACE], [2.0, 4.0, 2.0], 20.0, seed=0)
    turns = [[e for e in load if 20 * i <= e.arrival_s < 20 * (i + 1)] for i in range(3)]
    assert [len(turn) for turn in turns] == pytest.approx([40, 80, 40], rel=0.1)
    assert [entry.arrival_s for entry in load] == sorted(entry.arrival_s for entry in load)
    assert {entry.num_output_tokens for entry in turns[1]} == {99}
    names = [{name for entry in turn for name in entry.hash_ids} for turn in turns]
    assert not names[0] & names[1]
    assert names[0] & names[2], "caches may have what came before"
    assert turns[2][0].num_input_tokens == turns[0][0].num_input_tokens
    assert [e.hash_ids for e in turns[2]] != [e.hash_ids for e in turns[0]]


def test_blocks_are_never_more_than_there_are_and_beginnings_stay_longest() -> None:
    blocks = Blocks(num_blocks=100, block_size=16, piece_tokens=512)
    for name in range(5):
        blocks.lease(64)
        blocks.hold((name, 10 + name))
        blocks.release(64, (name, 10 + name))
        assert blocks.counts().total == 100
    assert blocks.matched_tokens((4, 14), 1024) == 1008, "the last token is computed"
    assert blocks.matched_tokens((3, 13), 1025) == 512
    assert blocks.matched_tokens((0,), 600) == 0


def test_the_page_says_where_the_planner_is_below() -> None:
    figures = Figures(10.0, 0.9, 0.1, 10**9, 1, 0.0, 0.0, 0.1, 1.0, num_requests=500)
    cells = [
        Cell("t", 1.0, "static split", "1:1", [figures, replace(figures, goodput=12.0)]),
        Cell("t", 1.0, "planned", "", [replace(figures, goodput=9.9)]),
        Cell("t", 10.0, "planned", "", [replace(figures, goodput=9.0, refused_ms=3.0)]),
    ]
    assert gains(cells) == {"static split": pytest.approx(0.9)}
    text = markdown(cells, [], Fleet(HARDWARE, 2, SLO, 60.0, 2), "command")
    assert text.count("(**missed**)") == 1
    assert "t 90.9 (met)" in text
    assert "a thousand requests took 2.0 to 2.0 s" in text
