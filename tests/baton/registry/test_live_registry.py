"""The whole system with its registry in a real Redis, which is stopped, restarted empty, and frozen
under load."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from baton.client import AsyncClient, SamplingParams
from baton.errors import NoWorkers
from baton.registry import redis as redis_module
from baton.types import Sampling
from bench.fault_proxy import FaultProxy, Weather
from engine.oracle import oracle_tokens
from gateway import server as gateway_module
from tests.support.live_tiers import decode_worker, gateway, prefill_worker
from tests.support.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.slow

LEASE_S, PERIOD_S, TIMEOUT_S = 0.5, 0.05, 0.25

#: As long, beside the lease and all else that Redis's users wait for, as 30 s are beside the
#: defaults.
OUTAGE_S = 3 * LEASE_S


#: Length of an answer that begins before the outage and ends after it.
NUM_LASTING_TOKENS = 400


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases and periods of a twentieth."""
    kind = redis_module.RedisRegistry
    brisk = functools.partial(kind, lease_s=LEASE_S, period_s=PERIOD_S, timeout_s=TIMEOUT_S)
    monkeypatch.setattr(redis_module, "RedisRegistry", brisk)


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with redis_server() as running:
        yield running


class Load:
    """Requests from several clients at once, for as long as the block lasts; each answer is
    checked."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._is_over = False
        self.num_done = 0
        self.moved = asyncio.Condition()

    async def requests(self, number: int) -> None:
        """Returns when so many more requests have been answered."""
        goal = self.num_done + number
        async with self.moved:
            await self.moved.wait_for(lambda: self.num_done >= goal)

    async def seconds(self, duration_s: float) -> None:
        """Returns when requests have been answered for so long."""
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            await self.requests(1)

    async def _one_client(self, number: int) -> None:
        while not self._is_over:
            prompt = [number, self.num_done % 900, *range(20)]
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            done = await self._client.generate(prompt, params)
            assert done.token_ids == tuple(oracle_tokens(prompt, Sampling(max_tokens=12), 1000))
            async with self.moved:
                self.num_done += 1
                self.moved.notify_all()

    @asynccontextmanager
    async def running(self, num_clients: int = 6) -> AsyncIterator[None]:
        """Raises, at the end or at once, whatever any request raised."""
        async with asyncio.TaskGroup() as group:
            for number in range(num_clients):
                group.create_task(self._one_client(number))
            yield
            self._is_over = True


async def until_ready(client: AsyncClient, *names: str) -> None:
    """Return when exactly these workers are known, and all are ready."""
    async with asyncio.timeout(60):
        while True:
            workers = (await client.model()).workers
            if sorted(w.worker_id for w in workers if w.state == "ready") == sorted(names):
                return
            await asyncio.sleep(0.02)


async def until_told(caplog: pytest.LogCaptureFixture, text: str, times: int) -> None:
    async with asyncio.timeout(60):
        while caplog.text.count(text) < times:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "how", ["stopped and restarted empty", pytest.param("frozen", marks=pytest.mark.long)]
)
async def test_an_outage_under_load_fails_no_request(
    server: RedisServer, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level("INFO")
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(prefill_worker(worker_id="p0", registry=server.url))
        await enter(decode_worker(worker_id="d0", registry=server.url))
        client = await enter(
            AsyncClient(await enter(gateway([], [], registry=server.url)), max_retries=0)
        )
        await until_ready(client, "p0", "d0")
        load = Load(client)
        async with load.running():
            await load.requests(20)
            params = SamplingParams(temperature=0.0, max_tokens=NUM_LASTING_TOKENS, ignore_eos=True)
            lasting = client.stream([7, 7], params)
            tokens = [*(await anext(lasting)).token_ids]
            if how == "frozen":
                server.freeze()
            else:
                await server.stop()
            await until_told(caplog, "cannot be used", 3)  # both workers and the gateway
            await load.seconds(OUTAGE_S)
            # While nobody can be told: one worker comes.
            await enter(decode_worker(worker_id="d1", registry=server.url))
            await until_told(caplog, "cannot be used", 4)
            await load.requests(20)
            if how == "frozen":
                server.thaw()
            else:
                await server.start()
            await until_ready(client, "p0", "d0", "d1")
            await load.seconds(2 * LEASE_S)
            async for piece in lasting:
                tokens += piece.token_ids
        assert tokens == oracle_tokens([7, 7], Sampling(max_tokens=NUM_LASTING_TOKENS), 1000)
        assert "is unreachable" not in caplog.text, "no connection was given up"


def late(link: FaultProxy) -> None:
    """Its answers come, but later than anybody waits for them."""
    link.weather(Weather(delay_s=TIMEOUT_S), Weather(delay_s=TIMEOUT_S))


def silent(link: FaultProxy) -> None:
    link.silence()


def gone(link: FaultProxy) -> None:
    link.refuse()
    link.cut()


@pytest.mark.parametrize(
    "inject",
    [
        silent,
        # As silence is, to who waits less long; as a stopped server is.
        pytest.param(late, marks=pytest.mark.long),
        pytest.param(gone, marks=pytest.mark.long),
    ],
)
async def test_a_bad_link_to_the_registry_fails_no_request(
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    inject: Callable[[FaultProxy], None],
) -> None:
    caplog.set_level("INFO")
    async with FaultProxy(server.port).running() as proxy, AsyncExitStack() as stack:
        enter, url = stack.enter_async_context, f"redis://127.0.0.1:{proxy.port}/0"
        await enter(prefill_worker(worker_id="p0", registry=url))
        await enter(decode_worker(worker_id="d0", registry=url))
        client = await enter(AsyncClient(await enter(gateway([], [], registry=url)), max_retries=0))
        await until_ready(client, "p0", "d0")
        load = Load(client)
        async with load.running():
            inject(proxy)
            await until_told(caplog, "cannot be used", 3)  # both workers and the gateway
            await load.seconds(OUTAGE_S)
            await enter(decode_worker(worker_id="d1", registry=url))
            await until_told(caplog, "cannot be used", 4)
            proxy.heal()
            await proxy.accept()
            await until_ready(client, "p0", "d0", "d1")
            await load.requests(20)
        assert "is unreachable" not in caplog.text, "no connection was given up"


@pytest.mark.long
async def test_who_comes_and_goes_is_seen_in_a_slow_registry_too(server: RedisServer) -> None:
    async with FaultProxy(server.port).running() as proxy, AsyncExitStack() as stack:
        # Delay of each round trip; listing takes several.
        proxy.weather(back=Weather(delay_s=TIMEOUT_S / 25))
        enter, url = stack.enter_async_context, f"redis://127.0.0.1:{proxy.port}/0"
        await enter(decode_worker(worker_id="d0", registry=url))
        client = await enter(AsyncClient(await enter(gateway([], [], registry=url)), max_retries=0))
        await until_ready(client, "d0")
        load = Load(client)
        async with load.running():
            await load.requests(20)
            async with decode_worker(worker_id="d1", registry=url):
                await until_ready(client, "d0", "d1")
                await load.seconds(2 * LEASE_S)
            await until_ready(client, "d0")


async def test_a_gateway_that_starts_in_an_outage_serves_after_it(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "WORKERS_TIMEOUT_S", 0.2)
    await server.stop()
    async with (
        decode_worker(worker_id="d0", registry=server.url),
        gateway([], [], registry=server.url) as address,
        AsyncClient(address, max_retries=0) as client,
    ):
        with pytest.raises(NoWorkers):
            await client.generate([1, 2], SamplingParams(max_tokens=2))
        assert not await client.health()
        await server.start()
        await until_ready(client, "d0")
        assert await client.health()
        async with Load(client).running(2):
            pass


async def test_workers_come_and_go_under_load_and_several_gateways_see_it(
    server: RedisServer,
) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(prefill_worker(worker_id="p0", registry=server.url))
        await enter(decode_worker(worker_id="d0", registry=server.url))
        clients = [
            await enter(
                AsyncClient(await enter(gateway([], [], registry=server.url)), max_retries=0)
            )
            for _ in range(2)
        ]
        loads = [Load(client) for client in clients]
        for client in clients:
            await until_ready(client, "p0", "d0")
        async with loads[0].running(4), loads[1].running(4):
            async with decode_worker(worker_id="d1", registry=server.url):
                for client in clients:
                    await until_ready(client, "p0", "d0", "d1")
                for load in loads:
                    await load.requests(10)
            # It drained: whatever ran there ended there or went elsewhere.
            for client in clients:
                await until_ready(client, "p0", "d0")
            for load in loads:
                await load.requests(10)
        for client in clients:
            async with asyncio.timeout(60):
                while len((await client.model()).workers) > 2:
                    await asyncio.sleep(0.02)


async def test_workers_of_another_model_are_left_to_other_gateways(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        decode_worker(worker_id="odd", registry=server.url, served_model_name="other"),
        decode_worker(worker_id="mine", registry=server.url),
        gateway([], [], registry=server.url) as address,
        AsyncClient(address, max_retries=0) as client,
    ):
        await until_ready(client, "mine")
        await until_told(caplog, "left to other gateways", 1)
        assert [w.worker_id for w in (await client.model()).workers] == ["mine"]
