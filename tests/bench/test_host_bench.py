"""The host's bench measures what it says: sequences that decode, blocks that are found, tokens that
reach clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.events import LocalPrefill, Tokens
from bench.ahead import measure_ahead, measure_host, measure_prompts
from bench.bare_servers import Steps
from bench.host import steps_for
from bench.host_connections import measure_idle, measure_slow_readers
from bench.host_gateway import Door, Flow, measure_added_ttft, measure_flow
from bench.host_rig import HostRig
from bench.host_service import measure_service
from bench.host_tier import measure_tier
from bench.split import TUNED, clusters_of
from bench.stub_engine import BLOCK_SIZE

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "baton-py-6m")


def test_every_sequence_gets_a_token_in_every_step() -> None:
    rig = HostRig(5, 2 * BLOCK_SIZE, 200)
    opened = rig.step(rig.opening)
    assert sum(isinstance(event, LocalPrefill) for event in opened) == 5
    for _ in range(2 * BLOCK_SIZE):
        events = rig.step()
        assert [len(event.samples) for event in events if isinstance(event, Tokens)] == [1] * 5
    rig.pool.check_integrity()


def test_steps_are_timed_both_ways() -> None:
    times = measure_ahead(3, engine_ms=2.0, num_rounds=1)
    assert times.num_seqs == 3
    assert times.waiting_ms >= times.engine_ms
    assert times.ahead_ms > 0


def test_the_real_engine_is_timed_over_steps_that_are_replayed() -> None:
    pytest.importorskip("triton")
    times = measure_host(2, 3 * BLOCK_SIZE, num_steps=BLOCK_SIZE + 1)
    assert 0 < times.launch_ms < times.step_ms


def test_prompts_are_computed_by_a_device_that_is_busy_in_each_step() -> None:
    pytest.importorskip("triton")
    times = measure_prompts(3 * BLOCK_SIZE, 32, engine_ms=1.0, num_steps=6, num_rounds=1)
    assert min(times.waiting_ms, times.ahead_ms) >= times.engine_ms


@pytest.mark.parametrize("num_seqs", [1, 7])
def test_all_costs_are_measured_without_running_out_of_blocks(num_seqs: int) -> None:
    costs = measure_tier(num_seqs, 34 * num_seqs, 2)
    assert costs.num_seqs == num_seqs
    assert costs.step_us > 0
    assert costs.find_us > 0


def test_fewer_steps_are_measured_of_larger_batches() -> None:
    steps = [steps_for(num_seqs) for num_seqs in (1, 16, 256, 4096, 10**6)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] > 1


@pytest.mark.slow
@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_all_tokens_of_a_source_come_through_the_gateway(door: Door) -> None:
    flow = Flow(num_streams=2, num_tokens=40, step_tokens=8, step_ms=0)
    costs = await measure_flow(MODEL, flow, door)
    assert 8 <= costs.chunk_tokens <= 40
    assert costs.tokens_per_s > 0


@pytest.mark.parametrize("step_s", [0.0, 0.002])
async def test_streams_of_a_bare_server_write_at_the_ends_of_the_same_steps(step_s: float) -> None:
    steps = Steps(step_s)
    ended: list[int] = []

    async def stream(index: int) -> None:
        for _ in range(3):
            await steps.next()
            ended.append(index)

    begin_s = asyncio.get_running_loop().time()
    await asyncio.gather(*map(stream, range(4)))
    assert ended == [0, 1, 2, 3] * 3
    assert asyncio.get_running_loop().time() - begin_s >= 2 * step_s


@pytest.mark.slow
async def test_a_source_that_waits_for_nobody_emits_all_tokens() -> None:
    flow = Flow(num_streams=2, num_tokens=40, step_tokens=1, step_ms=0.5)
    costs = await measure_flow(MODEL, flow)
    assert costs.flow.offered_per_s == 4000
    assert 1 <= costs.chunk_tokens <= 40


@pytest.mark.slow
async def test_tokens_of_a_stub_engine_come_to_clients() -> None:
    share = await measure_service(MODEL, num_streams=2, num_tokens=100, engine_ms=5.0)
    assert share.core_ms > share.engine_ms == 5.0
    assert share.client_ms > 0


@pytest.mark.slow
async def test_the_first_token_is_timed_at_the_gateway_and_at_the_source() -> None:
    ttft = await measure_added_ttft(MODEL, 5, "http")
    assert min(ttft.gateway_ms, ttft.source_ms, ttft.bare_ms) > 0
    assert ttft.beside_bare_ms == ttft.gateway_ms - ttft.bare_ms


@pytest.mark.slow
async def test_connections_that_want_nothing_are_watched() -> None:
    idle = await measure_idle(MODEL, 20, 0.1)
    assert 0 <= idle.cpu < 1
    slow = await measure_slow_readers(MODEL, 2, 30)
    assert min(slow.cpu_us, slow.brisk_cpu_us) > 0


def test_the_rivals_differ_in_what_is_compared_alone() -> None:
    split, colocated, tuned = clusters_of(MODEL, 48, {}).values()
    assert not split.colocated
    assert colocated.colocated
    workers = split.num_prefill_workers + split.num_decode_workers
    assert colocated.num_decode_workers == tuned.num_decode_workers == workers
    assert tuned == colocated.model_copy(update={"max_num_batched_tokens": 48})
    assert list(clusters_of(MODEL, 48, {}))[-1] == TUNED
