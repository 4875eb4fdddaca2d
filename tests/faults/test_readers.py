"""Clients that read slowly, or not at all: they hold up nobody else, and what they hold ends."""

from __future__ import annotations

import pytest

from baton.client import AsyncClient
from bench.fault_proxy import Weather
from tests.support.fault_streams import Streams, proxied_cluster, until_quiet

pytestmark = pytest.mark.slow


@pytest.mark.long
async def test_a_reader_that_stops_is_ended_and_a_slow_one_is_served() -> None:
    async with (
        proxied_cluster(1, 1, client_stall_timeout_s=3.0) as cluster,
        AsyncClient(cluster.address, max_retries=0) as observer,
        AsyncClient(cluster.front, max_retries=0) as client,
    ):
        link = cluster.links["gateway"]
        link.weather(back=Weather(bytes_per_s=10_000))
        slow = Streams(client, seed=1, num_streams=2, num_tokens=100)
        brisk = Streams(observer, seed=2)
        assert not await brisk.finish()
        assert not await slow.finish()
        link.weather()
        # One that reads nothing at all. The answers are so long that nobody waits for their ends
        # here.
        stopped = Streams(client, seed=3, num_streams=4, num_tokens=3000)
        await stopped.all_run()
        link.silence()
        await until_quiet(observer, 2)
        link.heal()
        errors = await stopped.finish()
        assert len(errors) == len(stopped.streams)
        # Who was silent for long enough has lost the connection, too.
        assert {error.reason for error in errors} <= {"CLIENT_STALLED", "WORKER_LOST"}
