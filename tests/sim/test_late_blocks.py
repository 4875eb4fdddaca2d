"""Prompts whose KV arrives before their blocks: nothing is lost, nobody starves, nothing stops."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import replace

import pytest

from baton.types import BeamParams, Sampling, SequenceSpec
from engine.oracle import oracle_tokens
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.mixed_requests import expected_outputs
from tests.support.sim_client import Choice, SimClient
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape
from worker_core.late_blocks import MAX_OVERTAKING
from worker_core.sequence import Stage

VOCAB = 1000
#: A step, and so a chunk, has so few tokens that most prompts are longer than what has blocks
#: ahead.
SHAPE = SimShape(num_blocks=24, max_num_batched_tokens=8, swap_bytes=1 << 20)


def client_of(seed: int, shape: SimShape = SHAPE, prefill: SimShape | None = None) -> SimClient:
    hub, rng = LoopbackHub(), random.Random(seed)
    client = SimClient(rng, [], [])
    own = prefill or replace(shape, num_blocks=96, swap_bytes=0)
    client.prefills = [SimPrefill(hub, lambda: client.now, own, f"p{at}") for at in range(2)]
    client.decodes = [SimDecode(hub, lambda: client.now, shape, "d0", seed=seed)]
    return client


def spec_of(index: int, num_prompt: int, max_tokens: int = 12, first: int = 0) -> SequenceSpec:
    prompt = tuple((first or 7 * index + 1) * at % VOCAB for at in range(1, num_prompt + 1))
    return SequenceSpec(f"r{index}", prompt, Sampling(max_tokens=max_tokens), arrival_ns=index)


def check(client: SimClient, specs: list[SequenceSpec]) -> None:
    client.quiet()
    assert not client.failed
    for spec in specs:
        expected = oracle_tokens(spec.prompt_token_ids, spec.sampling, VOCAB)
        assert client.output_of(Choice(spec.request_id, 0)) == expected


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("seed", range(12))
def test_prompts_that_need_each_others_blocks_all_get_their_tokens(seed: int) -> None:
    """Each takes most of the pool, several arrive at once, some share their beginnings."""
    client = client_of(seed, replace(SHAPE, host_blocks=60 if seed % 3 == 2 else 0))
    lengths = [client.rng.choice([3, 17, 50, 80]) for _ in range(14)]
    specs = [spec_of(i, n, first=11 if seed % 2 else 0) for i, n in enumerate(lengths)]
    client.waiting += specs
    client.run(num_cancels=0)
    check(client, specs)
    assert client.decodes[0].swap.is_empty


@pytest.mark.parametrize("seed", range(3))
def test_a_beam_search_of_one_beam_has_its_blocks_before_it_begins(seed: int) -> None:
    """Beams take their sequence's place with the first token: its KV has to be in blocks."""
    client = client_of(seed)
    specs = [
        replace(spec, sampling=replace(spec.sampling, beam=BeamParams(1)))
        for spec in (spec_of(index, 40 + index) for index in range(6))
    ]
    client.waiting += specs
    client.run()
    client.quiet()
    for spec in specs:
        (expected,) = expected_outputs(spec)
        assert client.output_of(expected.choice) == expected.token_ids


@pytest.mark.parametrize("seed", range(3))
def test_what_is_in_host_memory_counts_and_blocks_without_kv_are_not_copied(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(seed)
    (decoder,) = client.decodes
    swap, copied = decoder.swap, list[int]()
    copy_out = swap.copy_out

    def spy(key: Hashable, block_ids: Sequence[int], num_tokens: int) -> None:
        copied.append(num_tokens)
        ticket_end = -(-num_tokens // decoder.pool.block_size)
        assert len(block_ids) <= max(ticket_end, 0), "blocks were taken only to be given back"
        copy_out(key, block_ids, num_tokens)

    monkeypatch.setattr(swap, "copy_out", spy)
    client.waiting += [spec_of(index, 60 + index) for index in range(10)]
    for _ in range(3000):
        client.now += 0.01
        for spec in client.waiting:
            client.place(spec)
        client.waiting.clear()
        client.step_decode(decoder)
        for worker in client.prefills:
            client.step_prefill(worker)
        for swapped in swap._swapped.values():
            held = sum(len(data) for _, data in swapped.pieces)
            parked = sum(chunk.num_bytes for chunk in swapped.arrived)
            assert held + parked <= swapped.num_bytes
        assert swap.num_bytes == sum(each.num_bytes for each in swap._swapped.values())
        if not client.live and not client.waiting:
            break
    assert copied
    client.quiet()
    assert swap.num_bytes == 0


def test_a_prompt_larger_than_what_is_free_arrives_and_runs_when_there_is_room() -> None:
    client = client_of(0)
    (decoder,) = client.decodes
    small = [spec_of(index, 12, max_tokens=40) for index in range(3)]
    large = spec_of(9, 60)
    for spec in (*small, large):
        client.place(spec)
    stages: list[Stage] = []
    for _ in range(2000):
        if client.finished.keys() >= {Choice(large.request_id, 0)}:
            break
        client.now += 0.01
        client.step_decode(decoder)
        client.step_prefill(client.rng.choice(client.prefills))
        client.check_integrity()
        stages += [
            group.stage
            for group in decoder.core._state.groups.values()
            if group.spec.request_id == "r9"
        ]
    assert {Stage.AWAITING_KV, Stage.SWAPPED, Stage.RUNNING} <= set(stages)
    client.run()
    check(client, [*small, large])


def test_a_long_prompt_that_waits_lets_some_short_ones_pass_and_then_none() -> None:
    client = client_of(1)
    (decoder,) = client.decodes
    client.place(spec_of(0, 30, max_tokens=40))
    large, ended = spec_of(1, 75), list[str]()
    shorts = [spec_of(10 + index, 5, max_tokens=6) for index in range(60)]
    waits = list(shorts)
    for step in range(2000):
        client.now += 0.01
        if step == 6:
            client.place(large)
        if step > 20 and waits and len(client.live) < 6:
            client.place(waits.pop(0))
        client.step_decode(decoder)
        for worker in client.prefills:
            client.step_prefill(worker)
        client.check_integrity()
        ended += [each for each, _ in client.finished if each not in ended]
        waits += client.waiting
        client.waiting.clear()
        if not client.live and not waits:
            break
    check(client, [large, *shorts])
    assert 2 < ended.index("r1") <= MAX_OVERTAKING + 1


def most_in_flight(swap_bytes: int) -> int:
    """Most sequences at a decode worker at once, of prompts that take long to compute."""
    client = client_of(3, replace(SHAPE, num_blocks=60, swap_bytes=swap_bytes))
    (decoder,) = client.decodes
    waits, most = [spec_of(index, 80, max_tokens=4) for index in range(12)], 0
    for _ in range(3000):
        client.now += 0.01
        if not client.live and not waits and not client.waiting:
            break
        waits += client.waiting
        client.waiting.clear()
        if waits and client.rng.random() < 0.5:
            client.place(waits.pop(0))
        client.step_decode(decoder)
        for worker in client.prefills:
            client.step_prefill(worker)
        most = max(most, len(decoder.core._state.groups))
    client.quiet()
    return most


def test_more_sequences_are_in_flight_than_with_all_blocks_taken_at_the_start() -> None:
    assert most_in_flight(1 << 20) >= 2 * most_in_flight(0)
