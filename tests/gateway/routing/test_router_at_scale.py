"""Routing among a thousand workers: loads that agree within a tenth, and prefixes that are found
all the same.

The gateway's own fleet, planner and affinity place the sequences; workers are only numbers
(tests/support/sim_grid.py). A trace of the mooncake format, named by BATON_MOONCAKE_TRACE, is used
too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.types import BlockCounts, Slo, Tier, WorkerLoad
from gateway.routing.fleet import Fleet, Worker
from gateway.routing.history import MAX_MATCHES, PrefixAffinity
from gateway.routing.placement import NUM_DRAWN, Outcome, Placement, plan
from gateway.routing.router import Need, Plan, Verdict
from tests.support.fake_workers import make_info
from tests.support.sim_grid import (
    HASHED_TOKENS,
    Change,
    Grid,
    GridResult,
    TraceRequest,
    read_trace,
    synthetic_trace,
)
from tests.support.stub_link import StubLink

NUM_WORKERS = 1000
NUM_BLOCKS = 50_000
BLOCK_TOKENS = 16
MAX_NUM_SEQS = 64


#: Where loads of the workers are compared, which few do as many do: of a thousand, each test would
#: take five seconds.
NUM_COMPARED = 300


def fleet_of(num_prefills: int, num_decodes: int, **info: int) -> Fleet:
    """Workers that are ready and empty."""
    fleet = Fleet([f"p{i}:1" for i in range(num_prefills)], [f"d{i}:1" for i in range(num_decodes)])
    for address, worker in fleet.workers.items():
        facts = replace(
            make_info(address, worker.tier),
            **{
                "max_model_len": 1_000_000,
                "num_blocks": NUM_BLOCKS,
                "max_num_seqs": MAX_NUM_SEQS,
                "max_num_batched_tokens": 8192,
                "max_local_prefill_tokens": 0,
                **info,
            },
        )
        facts = replace(facts, layout=replace(facts.layout, block_size=BLOCK_TOKENS))
        fleet.join(address, facts, StubLink())
        fleet.report(address, WorkerLoad(blocks=BlockCounts(NUM_BLOCKS, 0, 0)))
    return fleet


class DecodeTier:
    """Decode workers that hold what they are given, as several gateways see them by reports
    alone."""

    def __init__(self, num_gateways: int, max_num_seqs: int) -> None:
        self.fleets = [
            fleet_of(0, NUM_COMPARED, max_num_seqs=max_num_seqs) for _ in range(num_gateways)
        ]
        self._max_num_seqs = max_num_seqs
        self.num_sequences = dict.fromkeys(self.fleets[0].workers, 0)
        self.num_blocks = dict.fromkeys(self.fleets[0].workers, 0)
        self._num_tries = 0

    def place(self, num_tokens: int) -> None:
        self._num_tries += 1
        fleet = self.fleets[self._num_tries % len(self.fleets)]
        need = Need(num_tokens, num_tokens, needs_decode=True)
        choice = plan(need, fleet, {}, self._num_tries.to_bytes(8, "big"))
        assert isinstance(choice, Plan)
        assert choice.decode
        num_blocks = -(-(num_tokens + 1) // BLOCK_TOKENS)
        worker = fleet.workers[choice.decode]
        placement = Placement(fleet, self._num_tries, None, worker, 1, num_blocks)
        placement.record(Outcome.RESERVED)
        self._add(choice.decode, 1, num_blocks)

    def fills(self) -> list[float]:
        """Used share of batch or memory, the larger one, by worker, relative to the mean."""
        fills = [
            max(self.num_sequences[a] / self._max_num_seqs, self.num_blocks[a] / NUM_BLOCKS)
            for a in self.num_sequences
        ]
        mean = sum(fills) / len(fills)
        return sorted(fill / mean for fill in fills)

    def _add(self, address: str, num_sequences: int, num_blocks: int) -> None:
        self.num_sequences[address] += num_sequences
        self.num_blocks[address] += num_blocks
        free = NUM_BLOCKS - self.num_blocks[address]
        load = WorkerLoad(
            num_running=self.num_sequences[address],
            blocks=BlockCounts(free, 0, self.num_blocks[address]),
        )
        for fleet in self.fleets:
            fleet.report(address, load)


def uneven_lengths(seed: int) -> Iterator[int]:
    """Tokens of sequences: most short, the longest a hundredth of a worker's memory."""
    rng = random.Random(seed)
    while True:
        yield 1 + min(NUM_BLOCKS * BLOCK_TOKENS // 100, int(rng.lognormvariate(7.8, 0.8)))


@pytest.mark.slow
@pytest.mark.parametrize(("max_num_seqs", "num_gateways"), [(64, 1), (4096, 3)])
def test_decode_workers_are_filled_alike_by_uneven_lengths(
    max_num_seqs: int, num_gateways: int
) -> None:
    """Within a tenth of the mean, whether the batch or the memory is what fills, and though no
    gateway knows more of the others' sequences than the workers report."""
    tier = DecodeTier(num_gateways, max_num_seqs)
    lengths = uneven_lengths(1)
    for _ in range(20 * NUM_COMPARED):
        tier.place(next(lengths))
    fills = tier.fills()
    assert fills[0] >= 0.9
    assert fills[-1] <= 1.1


@pytest.mark.slow
def test_a_placement_looks_at_few_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of(NUM_WORKERS // 2, NUM_WORKERS // 2)
    matched = dict.fromkeys(random.Random(1).sample(sorted(fleet.workers), MAX_MATCHES), 64)
    num_views = 0
    views = {name: getattr(Worker, name) for name in ("prefill_view", "decode_view")}

    def counted(name: str) -> object:
        def view(worker: Worker, *facts: float) -> object:
            nonlocal num_views
            num_views += 1
            return views[name](worker, *facts)

        return view

    for name in views:
        monkeypatch.setattr(Worker, name, counted(name))
    for number in range(200):
        num_views = 0
        choice = plan(Need(500, 600, needs_decode=True), fleet, matched, bytes((number,)))
        assert isinstance(choice, Plan)
        assert num_views <= 2 * NUM_DRAWN + MAX_MATCHES


@pytest.mark.slow
def test_the_only_worker_with_room_is_found_among_a_thousand() -> None:
    fleet = fleet_of(NUM_WORKERS // 2, NUM_WORKERS // 2)
    need = Need(500, 600, needs_decode=True)
    full = WorkerLoad(num_running=MAX_NUM_SEQS, blocks=BlockCounts(0, 0, NUM_BLOCKS))
    for worker in fleet.tier(Tier.DECODE):
        fleet.report(worker.address, full)
    stays = plan(need, fleet, {}, b"k")
    assert isinstance(stays, Plan)
    assert stays.prefill == stays.decode, "a prefill worker decodes on"
    for worker in fleet.tier(Tier.PREFILL):
        fleet.report(worker.address, full)
    assert plan(need, fleet, {}, b"k") is Verdict.NOT_NOW
    fleet.report("d77:1", WorkerLoad(blocks=BlockCounts(NUM_BLOCKS, 0, 0)))
    for worker in fleet.tier(Tier.PREFILL):
        worker.outstanding_tokens = 1_000_000
    fleet.workers["p33:1"].outstanding_tokens = 0
    for number in range(20):
        assert plan(need, fleet, {}, bytes((number,))) == Plan("p33:1", "d77:1")
    assert plan(replace(need, avoid=frozenset(("d77:1",))), fleet, {}, b"k") == Plan(
        "p33:1", "d77:1"
    )


def test_with_a_target_a_prompt_waits_here_rather_than_in_a_long_queue_of_a_worker() -> None:
    fleet = fleet_of(1, 1)
    room = BlockCounts(NUM_BLOCKS, 0, 0)
    fleet.report("p0:1", WorkerLoad(blocks=room, prefill_tokens_per_s=1000))
    fleet.workers["p0:1"].outstanding_tokens = 300
    need = Need(500, 600, needs_decode=True)
    assert plan(need, fleet, {}, b"k") == Plan("p0:1", "d0:1")
    fleet.slo = Slo(ttft_s=1.0)
    assert plan(need, fleet, {}, b"k") is Verdict.NOT_NOW, "not even to decode on there"
    fleet.workers["p0:1"].outstanding_tokens = 200
    assert plan(need, fleet, {}, b"k") == Plan("p0:1", "d0:1")


def test_workers_to_avoid_are_the_last_choice_among_a_thousand() -> None:
    fleet = fleet_of(NUM_DRAWN + 1, NUM_DRAWN + 1)
    good = {"p0:1", "d0:1"}
    need = Need(500, 600, needs_decode=True, avoid=frozenset(fleet.workers) - good)
    for number in range(50):
        assert plan(need, fleet, {}, bytes((number,))) == Plan("p0:1", "d0:1")


def poisson(lengths: Iterator[int], num_requests: int) -> list[TraceRequest]:
    """Prompts that have nothing in common."""
    rng = random.Random(7)
    arrival_s = 0.0
    requests = []
    for _ in range(num_requests):
        arrival_s += rng.expovariate(1.0)
        requests.append(TraceRequest(arrival_s, next(lengths), 1 + rng.randrange(50), ()))
    return requests


def check_balance(found: GridResult) -> None:
    """No worker of the prefill tier computes a tenth more, or less, than the mean."""
    assert found.prefill_work[0] >= 0.9
    assert found.prefill_work[-1] <= 1.1


def check_prefixes(found: GridResult) -> None:
    """Most of what could be found is found, and it costs no balance."""
    assert found.hit_share >= 0.8 * found.ideal_hit_share
    check_balance(found)


@pytest.mark.slow
def test_prefill_workers_compute_alike_though_lengths_are_uneven() -> None:
    """At a load at which most queues are empty, and tell nothing."""
    requests = poisson(uneven_lengths(1), 28 * NUM_COMPARED)
    roomy = {"max_num_seqs": 10**6, "num_blocks": 10**9}
    check_balance(Grid(NUM_COMPARED, 4, **roomy).run(requests, load=0.5))


@pytest.mark.slow
@pytest.mark.long
def test_several_gateways_balance_together() -> None:
    """Each knows only what it gave itself, beside the reports of queues."""
    requests = poisson(uneven_lengths(2), 10_000)
    check_balance(Grid(100, 100, num_gateways=3).run(requests, load=0.5))


@pytest.mark.slow
def test_prefixes_are_found_and_the_work_is_even() -> None:
    check_prefixes(Grid(25, NUM_WORKERS - 25).run(synthetic_trace(5000, 1), load=0.8))


@pytest.mark.slow
@pytest.mark.long
def test_prefixes_are_found_by_more_than_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = synthetic_trace(3000, 1)
    found = Grid(100, NUM_WORKERS - 100).run(requests, load=0.3)
    monkeypatch.setattr(PrefixAffinity, "matched_tokens", lambda _self, _digests: {})
    blind = Grid(100, NUM_WORKERS - 100).run(requests, load=0.3)
    assert found.hit_share >= 2 * blind.hit_share


def cut(request: TraceRequest) -> TraceRequest:
    """At 32,768 tokens: in a trace of a hundred prompts per worker, one of 190,000 would be a third
    of a worker's work."""
    num_tokens = min(request.num_input_tokens, 64 * HASHED_TOKENS)
    return replace(request, num_input_tokens=num_tokens, hash_ids=request.hash_ids[:64])


def test_a_recorded_trace() -> None:
    path = os.environ.get("BATON_MOONCAKE_TRACE")
    if path is None:
        pytest.skip("BATON_MOONCAKE_TRACE names no file of the mooncake format")
    requests = [cut(request) for request in read_trace(Path(path))]
    check_prefixes(Grid(40, NUM_WORKERS - 40).run(requests, load=0.4))


@pytest.mark.slow
def test_a_prefix_that_all_share_makes_no_hot_spot() -> None:
    """Three quarters of every prompt are the same: all workers come to have it, and they share the
    work."""
    rng = random.Random(3)
    hot = tuple(range(12))
    requests = [
        TraceRequest(
            float(index),
            512 * 16,
            1 + rng.randrange(200),
            (*hot, *range(100 + 4 * index, 104 + 4 * index)),
        )
        for index in range(4000)
    ]
    outcome = Grid(40, NUM_WORKERS - 40).run(requests, load=0.5)
    assert outcome.hit_share >= 0.95 * outcome.ideal_hit_share
    check_balance(outcome)


def waves_of_loss(num_prefills: int, num_decodes: int) -> Iterator[Change]:
    """Five times a tenth of the prefill workers, and some decode workers, go one after the other,
    and come back."""
    rng = random.Random(5)
    for wave in range(5):
        gone = [f"p{i}:1" for i in rng.sample(range(num_prefills), num_prefills // 10)]
        gone += [f"d{i}:1" for i in rng.sample(range(num_decodes), 20)]
        begin = 0.05 * (wave + 1)
        for number, address in enumerate(gone):
            yield Change(begin + number * 1e-4, address, is_there=False)
            yield Change(begin + 0.03 + number * 1e-4, address, is_there=True)


@pytest.mark.slow
@pytest.mark.long
def test_workers_that_come_and_go_cost_neither_prefixes_nor_balance() -> None:
    """The grid refuses a placement on a worker that is gone; work is measured from the last one's
    return on."""
    calm = Grid(25, NUM_WORKERS - 25).run(synthetic_trace(5000, 1), load=0.5)
    check_prefixes(calm)
    changes = waves_of_loss(25, NUM_WORKERS - 25)
    stormy = Grid(25, NUM_WORKERS - 25).run(synthetic_trace(5000, 1), load=0.5, changes=changes)
    assert stormy.hit_share >= 0.95 * calm.hit_share
    check_balance(stormy)
