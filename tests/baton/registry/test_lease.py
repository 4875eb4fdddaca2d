"""The planner's lease in a real Redis: one holder, later terms are greater, no Redis means none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from baton.registry import make_lease
from baton.registry.lease import SoleLease
from baton.registry.redis_lease import RedisLease
from tests.support.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.slow


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with redis_server() as running:
        yield running


async def test_one_gateway_leads_at_a_time(server: RedisServer) -> None:
    first, second = (RedisLease(server.url, "m", lease_s=60.0) for _ in range(2))
    other = RedisLease(server.url, "another model", lease_s=60.0)
    term = await first.hold()
    assert term
    assert await second.hold() is None
    assert await first.hold() == term, "renewed"
    assert await other.hold() is not None
    async with Redis.from_url(server.url) as client:
        await client.pexpire("baton:1:planner:{m}", 1)
        while await client.exists("baton:1:planner:{m}"):
            await asyncio.sleep(0.001)
        later = await second.hold()
        assert later is not None
        assert later > term
        assert await first.hold() is None
        await client.flushall()
        again = await first.hold()
        assert again is not None
        assert again >= later, "terms follow the clock where Redis forgot"
    for lease in (first, second, other):
        await lease.close()


async def test_the_next_leader_finds_the_number_that_the_last_one_recorded(
    server: RedisServer,
) -> None:
    first, second = (RedisLease(server.url, "m", lease_s=60.0) for _ in range(2))
    assert await first.record(5) is None, "nobody leads"
    await first.hold()
    assert await first.record(None) == 0
    assert await first.record(5) == 5
    assert await first.record(None) == 5
    assert await second.record(6) is None, "another leads"
    async with Redis.from_url(server.url) as client:
        await client.delete("baton:1:planner:{m}")
        await second.hold()
        assert await second.record(None) == 5
        assert await first.record(7) is None, "its term is over"
        assert await second.record(None) == 5
        assert await client.pttl("baton:1:planner-workers:{m}") > 0
    await server.stop()
    assert await second.record(6) is None
    for lease in (first, second):
        await lease.close()


async def test_nobody_leads_without_the_registry(server: RedisServer) -> None:
    lease = RedisLease(server.url, "m", timeout_s=5.0)
    assert await lease.hold() is not None
    await server.stop()
    assert await lease.hold() is None
    await server.start()
    assert await lease.hold() is not None
    await lease.close()


async def test_a_gateway_that_is_alone_leads() -> None:
    lease = make_lease(None, "m")
    assert isinstance(lease, SoleLease)
    assert await lease.hold() is not None
    assert await lease.record(None) == 0
    assert await lease.record(3) == await lease.record(None) == 3
