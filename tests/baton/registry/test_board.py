"""The board of gateways in a real Redis: notes of others, for a while."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from baton.registry import make_board
from baton.registry.redis_board import RedisBoard
from tests.support.redis_server import redis_server

pytestmark = pytest.mark.slow


async def test_each_reads_the_latest_notes_of_the_others_while_they_last() -> None:
    async with redis_server() as server:
        first, second = (RedisBoard(server.url, "m") for _ in range(2))
        brief = RedisBoard(server.url, "m", lasts_s=0.05)
        other = RedisBoard(server.url, "another model")
        assert await first.exchange("a b\n1") == {}
        assert list((await second.exchange("two")).values()) == ["a b\n1"]
        assert list((await first.exchange("three")).values()) == ["two"]
        assert await other.exchange("not theirs") == {}
        async with Redis.from_url(server.url) as client:
            await client.hset("baton:1:board:{m}", "stranger", "no time")
        assert set((await second.exchange("two")).values()) == {"three"}, (
            "strange notes are deleted"
        )
        await asyncio.sleep(0.1)
        assert await brief.exchange("four") == {}, "notes older than that say nothing"
        await server.stop()
        assert await first.exchange("five") == {}
        await server.start()
        assert await first.exchange("six") == {}
        for board in (first, second, brief, other):
            await board.close()


def test_a_gateway_without_a_registry_has_no_board() -> None:
    assert make_board(None, "m") is None
