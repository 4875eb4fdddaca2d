"""Real processes, real signals: whatever dies or freezes, each stream has the oracle's tokens, each
exactly once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from baton.client import AsyncClient
from bench.fault_proxy import ProxiedCluster
from gateway.request.assignment import MAX_FAILURES
from tests.support.fault_streams import Streams, proxied_cluster, until_quiet
from tests.support.sse_streams import by_sse

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs() -> AsyncIterator[ProxiedCluster]:
    """Two workers of each tier."""
    async with proxied_cluster(2, 2) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def singles() -> AsyncIterator[ProxiedCluster]:
    """One worker of each tier."""
    async with proxied_cluster(1, 1) as cluster:
        yield cluster


@asynccontextmanager
async def using(cluster: ProxiedCluster) -> AsyncIterator[AsyncClient]:
    """A client, and afterwards quiet."""
    async with AsyncClient(cluster.address, max_retries=0) as client:
        yield client
        await until_quiet(client, len(cluster.names) - 1)


def send(cluster: ProxiedCluster, signum: signal.Signals, *names: str) -> None:
    for name in names:
        os.kill(cluster.pid_of(name), signum)


async def cut_off(cluster: ProxiedCluster, client: AsyncClient) -> None:
    """Returns when the gateway has noticed that the decode worker cannot be reached. It stays so
    until it is let back."""
    link = cluster.links["decode-0"]
    link.refuse()
    link.cut()
    while all(worker.state != "unreachable" for worker in (await client.model()).workers):
        pass


@pytest.mark.parametrize("victims", [("decode-0",), ("prefill-0",), ("decode-1", "prefill-1")])
async def test_killed_workers_cost_no_stream_a_token(
    pairs: ProxiedCluster, victims: tuple[str, ...]
) -> None:
    async with using(pairs) as client:
        streams = Streams(client, seed=1, num_streams=16, num_tokens=100)
        await streams.all_run()
        send(pairs, signal.SIGKILL, *victims)
        assert not await streams.finish()
        if victims[0].startswith("decode"):
            assert streams.num_resumes


@pytest.mark.parametrize("victims", [("decode-0",), ("prefill-1",), ("gateway",)])
async def test_kills_cost_no_stream_by_http_a_token(
    pairs: ProxiedCluster, victims: tuple[str, ...]
) -> None:
    async with using(pairs):
        source = by_sse(lambda: pairs.http_address)
        streams = Streams(source, seed=14, num_streams=12, num_tokens=100)
        await streams.all_run()
        send(pairs, signal.SIGKILL, *victims)
        assert not await streams.finish()


async def test_a_killed_gateway_costs_no_stream_a_token(pairs: ProxiedCluster) -> None:
    """Its successor takes the streams up at the same address."""
    async with AsyncClient(pairs.address, max_retries=5) as client:
        streams = Streams(client, seed=2, num_streams=16, num_tokens=100)
        await streams.all_run()
        send(pairs, signal.SIGKILL, "gateway")
        assert not await streams.finish()
        await until_quiet(client, 4)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_a_frozen_worker_is_noticed_and_what_it_says_later_is_not_heard(
    pairs: ProxiedCluster, victim: str
) -> None:
    async with using(pairs) as client:
        streams = Streams(client, seed=3, num_streams=12)
        await streams.streams[0].tokens(1)
        send(pairs, signal.SIGSTOP, victim)
        try:
            assert not await streams.finish()
        finally:
            send(pairs, signal.SIGCONT, victim)
        await until_quiet(client, 4)
        assert not await Streams(client, seed=4).finish()


async def test_the_decode_worker_that_streams_were_resumed_on_dies_too(
    pairs: ProxiedCluster,
) -> None:
    async with using(pairs) as client:
        streams = Streams(client, seed=5, num_tokens=150)
        await streams.all_run()
        send(pairs, signal.SIGKILL, "decode-0")
        # Those that were on the other are resumed here, while it is killed, or wait for the return
        # of either.
        send(pairs, signal.SIGKILL, "decode-1")
        assert not await streams.finish()
        assert streams.num_resumes >= len(streams.streams)


async def test_a_stream_outlives_three_failures_and_ends_cleanly_at_the_fourth(
    singles: ProxiedCluster,
) -> None:
    async with using(singles) as client:
        streams = Streams(client, seed=6, num_streams=1, num_tokens=200)
        (stream,) = streams.streams
        await stream.tokens(5)
        for _ in range(MAX_FAILURES):
            await cut_off(singles, client)
            await singles.links["decode-0"].accept()
            await stream.tokens(stream.num_tokens + 5)
            assert not stream.task.done()
        singles.links["decode-0"].cut()
        (error,) = await streams.finish()
        assert error.reason == "WORKER_LOST"
        assert error.retry_after_s


async def test_without_a_prefill_tier_decode_workers_compute_prompts(
    singles: ProxiedCluster,
) -> None:
    async with using(singles) as client:
        streams = Streams(client, seed=7)
        await streams.all_run()
        send(singles, signal.SIGKILL, "prefill-0")
        later = Streams(client, seed=8)
        assert not await streams.finish()
        assert not await later.finish()


async def test_without_a_decode_tier_new_requests_fail_at_once_and_old_ones_wait(
    singles: ProxiedCluster,
) -> None:
    async with using(singles) as client:
        streams = Streams(client, seed=9)
        await streams.all_run()
        await cut_off(singles, client)
        errors = await Streams(client, seed=10, num_streams=2).finish()
        assert [error.reason for error in errors] == ["NO_WORKERS"] * 2
        assert all(error.retry_after_s for error in errors)
        await singles.links["decode-0"].accept()
        assert not await streams.finish()


async def test_a_rolling_restart_of_every_worker(pairs: ProxiedCluster) -> None:
    async with using(pairs) as client:
        for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
            streams = Streams(client, seed=11)
            await streams.all_run()
            send(pairs, signal.SIGTERM, name)
            assert not await streams.finish()
            await until_quiet(client, 4)


async def test_a_gateway_that_is_told_to_go_lets_its_streams_end(singles: ProxiedCluster) -> None:
    async with using(singles) as client:
        streams = Streams(client, seed=12)
        await streams.all_run()
        send(singles, signal.SIGTERM, "gateway")
        assert not await streams.finish()


async def test_streams_that_their_clients_give_up_at_any_token_leave_nothing(
    pairs: ProxiedCluster,
) -> None:
    async with using(pairs) as client:
        streams = Streams(client, seed=13, num_streams=20)

        async def give_up(number: int) -> None:
            stream = streams.streams[number]
            await stream.tokens(3 * number)
            await stream.cancel()

        await asyncio.gather(*(give_up(number) for number in range(20)))
