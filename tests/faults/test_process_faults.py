"""Real processes, real signals: whatever dies or freezes, each stream has the oracle's tokens, each exactly once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.client import AsyncClient, SamplingParams
from baton.config import ServeOptions
from baton.engine.oracle import oracle_tokens
from baton.supervisor import Cluster
from baton.types import Sampling
from tests.support.live_tiers import BOX_MODEL

NUM_STREAMS = 16
NUM_TOKENS = 150


@asynccontextmanager
async def oracle_cluster(
    num_prefill: int = 2, num_decode: int = 2
) -> AsyncIterator[tuple[Cluster, AsyncClient]]:
    options = ServeOptions(
        model=str(BOX_MODEL),
        engine="oracle",
        oracle_step_ms=8.0,
        max_num_batched_tokens=64,
        num_prefill_workers=num_prefill,
        num_decode_workers=num_decode,
        prefill_block_size=32,
        decode_block_size=8,
        num_gpu_blocks_override=2000,
        port=0,
        drain_timeout_s=2,
        log_level="error",
    )
    async with Cluster(options) as cluster, AsyncClient(cluster.address) as client:
        yield cluster, client


class Streams:
    """Many streams at once; each checks itself against the oracle."""

    def __init__(self, client: AsyncClient, seed: int) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.num_resumes = 0
        self.first_token = asyncio.Event()
        self._tasks = [asyncio.create_task(self._one()) for _ in range(NUM_STREAMS)]

    async def _one(self) -> None:
        prompt = [self.rng.randrange(1000) for _ in range(self.rng.randint(30, 400))]
        seed = self.rng.getrandbits(63)
        temperature = self.rng.choice([0.0, 0.75])
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        tokens: list[int] = []
        async with self.client.stream(prompt, params) as stream:
            async for chunk in stream:
                assert chunk.token_index == len(tokens)
                tokens += chunk.token_ids
                self.first_token.set()
                if chunk.timing:
                    self.num_resumes += chunk.timing.num_resumes
        sampling = Sampling(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS)
        assert tokens == oracle_tokens(prompt, sampling, 1000)

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)


async def until_quiet(client: AsyncClient, num_workers: int) -> None:
    """Every worker is ready again and holds nothing."""
    while True:
        workers = (await client.model()).workers
        ready = [worker for worker in workers if worker.state == "ready"]
        if len(ready) == num_workers and not any(
            worker.num_leased_blocks or worker.num_in_flight for worker in ready
        ):
            return
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_a_killed_worker_costs_no_stream_a_token(victim: str) -> None:
    async with oracle_cluster() as (cluster, client):
        streams = Streams(client, seed=1)
        await streams.first_token.wait()
        os.kill(cluster.pid_of(victim), signal.SIGKILL)
        await streams.finish()
        if victim.startswith("decode"):
            assert streams.num_resumes
        await until_quiet(client, 4)


async def test_one_of_each_tier_killed_at_once() -> None:
    async with oracle_cluster() as (cluster, client):
        streams = Streams(client, seed=2)
        await streams.first_token.wait()
        os.kill(cluster.pid_of("decode-1"), signal.SIGKILL)
        os.kill(cluster.pid_of("prefill-1"), signal.SIGKILL)
        await streams.finish()
        await until_quiet(client, 4)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_a_frozen_worker_is_noticed_and_what_it_says_later_is_not_heard(victim: str) -> None:
    async with oracle_cluster() as (cluster, client):
        streams = Streams(client, seed=3)
        await streams.first_token.wait()
        pid = cluster.pid_of(victim)
        os.kill(pid, signal.SIGSTOP)
        try:
            await streams.finish()
        finally:
            os.kill(pid, signal.SIGCONT)
        await until_quiet(client, 4)
        again = Streams(client, seed=4)
        await again.finish()


async def test_the_only_decode_worker_is_killed_and_streams_wait_for_its_return() -> None:
    async with oracle_cluster(1, 1) as (cluster, client):
        streams = Streams(client, seed=5)
        await streams.first_token.wait()
        os.kill(cluster.pid_of("decode-0"), signal.SIGKILL)
        await streams.finish()
        await until_quiet(client, 2)


async def test_a_rolling_restart_of_every_worker() -> None:
    async with oracle_cluster() as (cluster, client):
        for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
            streams = Streams(client, seed=6)
            await streams.first_token.wait()
            os.kill(cluster.pid_of(name), signal.SIGTERM)
            await streams.finish()
            await until_quiet(client, 4)
