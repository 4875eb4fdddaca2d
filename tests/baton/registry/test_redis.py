"""The registry in a real Redis: leases, outages, lost memory, a frozen server, strange entries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from baton.errors import ConfigError
from baton.registry import Registration, WorkerAdded, WorkerRemoved
from baton.registry.interface import Change
from baton.registry.redis import KEY_PREFIX, RedisRegistry
from baton.registry.registration import to_json
from baton.types import Tier, WorkerLoad
from tests.support.fake_workers import make_info
from tests.support.redis_server import RedisServer, redis_server

DECODE = Registration("d:1", make_info("d", Tier.DECODE), ("shm", "tcp"), WorkerLoad())
PREFILL = Registration("p:1", make_info("p", Tier.PREFILL), ("tcp",), WorkerLoad())


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with redis_server() as running:
        yield running


def registry(
    server: RedisServer, *, lease_s: float = 60.0, timeout_s: float = 30.0
) -> RedisRegistry:
    return RedisRegistry(
        server.url, DECODE.info.model, lease_s=lease_s, period_s=0.02, timeout_s=timeout_s
    )


@asynccontextmanager
async def announced(
    server: RedisServer, current: Callable[[], Registration | None], **options: float
) -> AsyncIterator[asyncio.Task[None]]:
    """options: those of `registry`."""
    task = asyncio.create_task(registry(server, **options).announce(current))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def watched(
    server: RedisServer, **options: float
) -> AsyncIterator[AsyncGenerator[Change, None]]:
    """options: those of `registry`."""
    async with aclosing(registry(server, **options).changes()) as changes:
        yield changes


async def test_workers_join_drain_and_leave(server: RedisServer) -> None:
    entry = DECODE
    async with watched(server) as changes, announced(server, lambda: entry):
        assert await anext(changes) == WorkerAdded("d:1", Tier.DECODE)
        async with announced(server, lambda: PREFILL):
            assert await anext(changes) == WorkerAdded("p:1", Tier.PREFILL)
        assert await anext(changes) == WorkerRemoved("p:1"), (
            "taken off at once, not at its lease's end"
        )
        entry = replace(DECODE, load=WorkerLoad(is_draining=True))
        assert await anext(changes) == WorkerRemoved("d:1")


async def test_an_entry_ends_with_its_lease(server: RedisServer) -> None:
    entry: Registration | None = DECODE
    async with watched(server) as changes, announced(server, lambda: entry, lease_s=0.2):
        assert await anext(changes) == WorkerAdded("d:1", Tier.DECODE)
        entry = None  # its engine loop stands still
        assert await anext(changes) == WorkerRemoved("d:1")
        entry = DECODE
        assert await anext(changes) == WorkerAdded("d:1", Tier.DECODE)


async def test_an_outage_is_no_change_and_an_empty_restart_is_repaired(server: RedisServer) -> None:
    async with announced(server, lambda: DECODE), watched(server) as changes:
        assert await anext(changes) == WorkerAdded("d:1", Tier.DECODE)
        await server.stop()
        next_change = asyncio.ensure_future(anext(changes))
        async with announced(server, lambda: PREFILL):  # appears while Redis is down
            await server.start()
            seen = [await next_change]
            # The list may be read before the first worker is back on it; then there are two
            # changes.
            while WorkerAdded("p:1", Tier.PREFILL) not in seen or seen.count(
                WorkerRemoved("d:1")
            ) > seen.count(WorkerAdded("d:1", Tier.DECODE)):
                seen.append(await anext(changes))
            assert WorkerRemoved("p:1") not in seen


async def test_a_watch_that_begins_in_an_outage_goes_on_after_it(server: RedisServer) -> None:
    await server.stop()
    async with watched(server) as changes, announced(server, lambda: DECODE):
        first = asyncio.ensure_future(anext(changes))
        await server.start()
        assert await first == WorkerAdded("d:1", Tier.DECODE)


@pytest.mark.slow
@pytest.mark.slow
async def test_a_frozen_server_holds_up_nobody(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(server, timeout_s=1.0) as changes:
        async with announced(server, lambda: DECODE, timeout_s=1.0) as announcing:
            assert await anext(changes) == WorkerAdded("d:1", Tier.DECODE)
            server.freeze()
            next_change = asyncio.ensure_future(anext(changes))
            async with asyncio.timeout(60):
                while caplog.text.count("cannot be used") < 2:  # the watch's, and the worker's
                    await asyncio.sleep(0.02)
            assert not next_change.done()
            assert not announcing.done()
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)  # ends though it is frozen
        server.thaw()
        async with announced(server, lambda: PREFILL):
            # What was sent while it was frozen may have been done by it, or not.
            while await next_change != WorkerAdded("p:1", Tier.PREFILL):
                next_change = asyncio.ensure_future(anext(changes))
    assert caplog.text.count("cannot be used") == 2, "an outage is told once by each"


async def test_strange_entries_hide_no_other(server: RedisServer) -> None:
    async with Redis.from_url(server.url) as client:
        await client.set(KEY_PREFIX + "a:1", "nonsense")
        await client.set(KEY_PREFIX + "b:1", b"\xff\xfe")
        await client.hset(KEY_PREFIX + "c:1", "k", "v")
        await client.set("something else", "of another program")
        other = replace(PREFILL, info=replace(PREFILL.info, model="another"))
        await client.set(KEY_PREFIX + "p:1", to_json(other))
    async with watched(server) as changes, announced(server, lambda: DECODE):
        assert await anext(changes) == WorkerAdded("d:1", Tier.DECODE)


async def test_a_worker_takes_off_only_its_own_entry(server: RedisServer) -> None:
    """A later boot at the same address may have been listed before the earlier one is quite
    gone."""
    earlier = RedisRegistry(server.url, period_s=3600.0)
    async with Redis.from_url(server.url) as client:
        for later in (to_json(replace(DECODE, transports=("tcp",))), to_json(DECODE)):
            announcing = asyncio.create_task(earlier.announce(lambda: DECODE))
            async with asyncio.timeout(60):
                while await client.get(KEY_PREFIX + "d:1") != to_json(DECODE).encode():
                    await asyncio.sleep(0.01)
            await client.set(KEY_PREFIX + "d:1", later)
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
            is_own = later == to_json(DECODE)
            assert await client.get(KEY_PREFIX + "d:1") == (None if is_own else later.encode())


async def test_a_cancel_that_the_client_library_swallows_still_ends_the_task(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = asyncio.Event()

    async def set_and_swallow(_client: Redis, *_arguments: object, **_options: object) -> None:
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RedisConnectionError("taken for a lost connection") from None

    monkeypatch.setattr(Redis, "set", set_and_swallow)
    task = asyncio.create_task(RedisRegistry(server.url, timeout_s=100.0).announce(lambda: DECODE))
    await reached.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


@pytest.mark.slow
async def test_many_workers_are_all_seen(server: RedisServer) -> None:
    async with Redis.from_url(server.url) as client:
        entries = {
            KEY_PREFIX + f"d:{port}": to_json(replace(DECODE, address=f"d:{port}"))
            for port in range(1, 1201)
        }
        await client.mset(entries)
    async with watched(server) as changes:
        joined = {await anext(changes) for _ in entries}
        assert joined == {WorkerAdded(f"d:{port}", Tier.DECODE) for port in range(1, 1201)}


@pytest.mark.parametrize(
    "url",
    [
        "http://a:1",
        "redis://a:port/0",
        "redis://a:99999",
        "redis://[::1",
        "redis://me:secret/s@a:1",
        "redis://me:secret#s@a:1",
        "redis://:secret@[::1",
        "me:secret@a:1",
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="--registry") as caught:
        RedisRegistry(url)
    assert "secret" not in str(caught.value) + str(caught.value.metadata)


async def test_an_outage_is_told_without_the_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    gone = RedisRegistry("redis://me:secret@127.0.0.1:1/0", period_s=0.01, timeout_s=0.3)
    announcing = asyncio.create_task(gone.announce(lambda: DECODE))
    async with asyncio.timeout(60):
        while "cannot be used" not in caplog.text:
            await asyncio.sleep(0.01)
    announcing.cancel()
    await asyncio.gather(announcing, return_exceptions=True)
    assert "127.0.0.1:1" in caplog.text
    assert "secret" not in caplog.text
