"""A real Redis as a tier."""

from __future__ import annotations

import asyncio

from redis import Redis

from engine.kv.tiers.redis import RedisTier
from tests.support.redis_server import redis_server


async def test_what_the_server_gave_up_is_forgotten_once_asked_for() -> None:
    def check(url: str) -> None:
        tier, client = RedisTier(url, bytes(32)), Redis.from_url(url)
        for key in (b"a", b"b"):
            tier.put(key, memoryview(bytearray(b"record of " + key)))
        assert tier.get([b"a", b"b"]) == [b"record of a", b"record of b"]
        client.delete(*client.keys("*:a"))
        assert tier.get([b"a", b"b"]) == [None, b"record of b"]
        assert (tier.has(b"a"), tier.has(b"b")) == (False, True)
        tier.put(b"a", b"again")
        assert tier.get([b"a"]) == [b"again"]
        tier.close()
        client.close()

    async with redis_server() as server:
        await asyncio.to_thread(check, server.url)
