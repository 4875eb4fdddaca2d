"""Gateway and both tiers over real gRPC and a real KV channel, oracle engines inside."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.client import AsyncClient, SamplingParams
from baton.client.requests import generate_request
from baton.errors import Cancelled, ClientStalled, DeadlineExceeded, NoWorkers, Overloaded
from baton.rpc.status import from_rpc_error
from baton.types import FinishReason, Sampling
from baton.v1 import inference_pb2_grpc
from engine.oracle import oracle_tokens
from tests.support.live_tiers import (
    ONLY_DECODES,
    LiveSystem,
    decode_worker,
    gateway,
    has_crossed,
    live_system,
    prefill_worker,
)

pytestmark = pytest.mark.slow

FOREVER = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def expected(prompt: list[int], max_tokens: int, **sampling: float | int) -> tuple[int, ...]:
    return tuple(oracle_tokens(prompt, Sampling(max_tokens=max_tokens, **sampling), 1000))  # type: ignore[arg-type]


async def check_alive(system: LiveSystem) -> None:
    prompt = [5, 6, 7, *range(40)]
    done = await system.client.generate(prompt, greedy(9))
    assert done.token_ids == expected(prompt, 9)


@pytest.mark.parametrize(
    ("transport", "speculative_method"), [("shm", "ngram"), ("tcp", "ngram"), ("shm", "none")]
)
async def test_many_streams_of_all_kinds(transport: str, speculative_method: str) -> None:
    """Without drafts, steps are launched ahead."""
    rng = random.Random(1)
    async with live_system(
        2,
        2,
        worker_options={"kv_transport": transport, "max_num_batched_tokens": 64},
        decode_options={**ONLY_DECODES, "speculative_method": speculative_method},
    ) as system:
        crossed: list[bool] = []

        async def one(index: int) -> None:
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 90))]
            seed = rng.getrandbits(63)
            is_greedy = index % 2 == 0
            params = SamplingParams(
                temperature=0.0 if is_greedy else 0.75,
                seed=seed,
                max_tokens=1 + index % 30,
                ignore_eos=True,
                logprobs=2 if index % 5 == 0 else None,
            )
            done = await system.client.generate(prompt, params)
            temperature = 0.0 if is_greedy else 0.75
            assert done.token_ids == expected(
                prompt, 1 + index % 30, temperature=temperature, seed=seed
            )
            assert done.finish_reason is FinishReason.LENGTH
            crossed.append(has_crossed(done))
            # Who prefills gives the first token, so that a single one needs no decode worker.
            assert crossed[-1] == (len(done.token_ids) > 1) or done.timing.num_resumes
            assert done.usage.prompt_tokens == len(prompt)
            assert done.usage.completion_tokens == len(done.token_ids)
            assert len(done.choices[0].logprobs) == (len(done.token_ids) if index % 5 == 0 else 0)

        await asyncio.gather(*(one(index) for index in range(60)))
        assert any(crossed)
        await system.until_quiet()


async def test_timing_tells_each_tier() -> None:
    async with live_system(
        worker_options={"oracle_step_ms": 2.0}, decode_options=ONLY_DECODES
    ) as system:
        done = await system.client.generate(list(range(64)), greedy(8))
        timing = done.timing
        assert (timing.prefill_worker, timing.decode_worker) == ("p0", "d0")
        assert timing.transfer_bytes == 64 * 4 * 2 * 2 * 8
        assert timing.prefill_ms >= 2.0
        assert timing.decode_ms >= 2.0 * 6
        assert timing.total_ms >= timing.time_to_first_token_ms >= timing.prefill_ms
        again = await system.client.generate([*range(64), 7], greedy(2))
        assert again.usage.cached_tokens + again.usage.decode_cached_tokens >= 60


async def test_cancels_at_any_moment_leave_nothing_behind() -> None:
    """Twice 100 concurrent streams, most cancelled at random moments: the second time opens no lane
    or connection that the first did not, so no block, task, thread or descriptor may be left that
    was not there before it."""
    rng = random.Random(7)
    options = {"oracle_step_ms": 1.0, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 400}
    async with live_system(2, 2, worker_options=options) as system:
        num_whole = 0

        async def one() -> None:
            nonlocal num_whole
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 120))]
            limit = rng.choice([0, 1, 2, 5, 20, None])
            async with system.client.stream(prompt, greedy(30)) as stream:
                num_seen = 0
                if limit == 0 and rng.random() < 0.5:
                    await asyncio.sleep(rng.uniform(0, 0.2))
                    return
                async for chunk in stream:
                    num_seen += len(chunk.token_ids)
                    if limit is not None and num_seen >= limit:
                        return
            assert num_seen == 30
            num_whole += 1

        async def round_of_100() -> None:
            await asyncio.gather(*(one() for _ in range(100)))
            await system.until_quiet()
            await check_alive(system)
            await system.until_quiet()
            gc.collect()

        await round_of_100()
        before = _resources()
        await round_of_100()
        assert num_whole
        # Slow releases may end; a leak stays, and the timeout ends the wait.
        async with asyncio.timeout(60):
            while any(number > before[name] for name, number in _resources().items()):
                await asyncio.sleep(0.05)


def _resources() -> dict[str, int]:
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


async def test_a_cancelled_task_and_a_lost_client_free_both_tiers() -> None:
    async with live_system(worker_options={"oracle_step_ms": 1.0}) as system:
        task = asyncio.create_task(system.client.generate([1, 2, 3], FOREVER))
        async with AsyncClient(system.gateway, max_retries=0) as other:
            stream = other.stream([4, 5, 6], FOREVER)
            await anext(aiter(stream))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(Cancelled):
            async for _ in stream:
                pass
        await system.until_quiet()
        await check_alive(system)


async def test_a_deadline_ends_the_request_everywhere() -> None:
    async with live_system(worker_options={"oracle_step_ms": 5.0}) as system:
        with pytest.raises(DeadlineExceeded):
            await system.client.generate([1, 2, 3], FOREVER, timeout_s=0.4)
        await system.until_quiet()
        await check_alive(system)


async def test_a_client_that_stops_reading_is_ended_and_holds_up_nobody() -> None:
    async with live_system(gateway_options={"client_stall_timeout_s": 0.5}) as system:
        # 20 alternatives a position are more than the window of a stream that does not grow holds.
        request = generate_request(
            [1, 2, 3],
            FOREVER.with_options(logprobs=20),
            model="",
            priority=0,
            cache_salt="",
            add_special_tokens=True,
        )
        options = (("grpc.http2.bdp_probe", 0),)
        async with grpc.aio.insecure_channel(system.gateway, options=options) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
            await call.read()
            await check_alive(system)
            await system.until_quiet()
            with pytest.raises(grpc.RpcError) as ended:
                await read_to_end(call)
        assert isinstance(from_rpc_error(ended.value), ClientStalled)


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_memory_pressure_preempts_and_every_stream_is_right() -> None:
    options = {"num_gpu_blocks_override": 40, "max_model_len": 150}
    async with live_system(decode_options=options) as system:

        async def one(index: int) -> None:
            prompt = [index, *range(20)]
            done = await system.client.generate(prompt, greedy(60))
            assert done.token_ids == expected(prompt, 60)

        await asyncio.gather(*(one(index) for index in range(12)))
        await system.until_quiet()


async def test_a_full_gateway_says_when_to_come_again() -> None:
    async with live_system(
        worker_options={"max_num_seqs": 1, "oracle_step_ms": 2.0},
        gateway_options={"max_queue_size": 2},
    ) as system:
        calls = [system.client.generate([i, 2, 3], greedy(50)) for i in range(8)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [r for r in results if isinstance(r, Overloaded)]
        assert refused
        assert all(error.retry_after_s for error in refused)
        assert len(refused) + sum(not isinstance(r, BaseException) for r in results) == 8
        await system.until_quiet()


async def test_a_missing_worker_is_told_and_joins_when_it_appears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.server.WORKERS_TIMEOUT_S", 0.2)
    async with decode_worker() as first:
        port = int(first.rpartition(":")[2])
    # The address is free again: nobody is there when the gateway starts.
    async with (
        prefill_worker() as prefill,
        gateway([prefill], [first]) as address,
        AsyncClient(address, max_retries=0) as client,
    ):
        with pytest.raises(NoWorkers) as refused:
            await client.generate([1, 2], greedy(3))
        assert refused.value.retry_after_s
        assert not await client.health()
        async with decode_worker(port=port):
            async with asyncio.timeout(60):
                while not await client.health():
                    await asyncio.sleep(0.02)
            done = await client.generate([1, 2], greedy(3))
            assert done.token_ids == expected([1, 2], 3)


async def test_a_worker_of_another_model_is_refused_by_name_and_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.server.WORKERS_TIMEOUT_S", 0.2)
    async with (
        decode_worker(worker_id="good") as good,
        decode_worker(worker_id="odd", served_model_name="other") as odd,
        prefill_worker() as prefill,
        gateway([prefill], [good, odd]) as address,
        AsyncClient(address, max_retries=0) as client,
    ):
        states: set[str] = set()
        async with asyncio.timeout(60):
            while not (states and states <= {"ready", "refused"}):
                await asyncio.sleep(0.02)
                workers = {worker.address: worker for worker in (await client.model()).workers}
                states = {workers[address].state for address in (good, odd, prefill)}
        done = await client.generate([1, 2], greedy(3))
        assert done.token_ids == expected([1, 2], 3)
        refused = [worker for worker in workers.values() if worker.state == "refused"]
        assert refused
        assert all("model" in worker.reason for worker in refused)
