"""What the planner has under way when something dies, on real processes: the gateway that leads,
Redis, a worker that starts, one that drains, one that changes its role. Each stream has the
oracle's tokens, each exactly once, and the fleet becomes what the leader wants.

tests/sim/test_planned_scaling.py has the same under a virtual clock, in many orders.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http.client import HTTPException

import pytest
import pytest_asyncio

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.errors import BatonError
from tests.support.fault_streams import Streams
from tests.support.led_cluster import LedCluster
from tests.support.live_tiers import BOX_MODEL
from tests.support.metrics_page import fetch_metrics
from tests.support.processes import pids_of
from tests.support.redis_server import RedisServer, redis_server

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

GATEWAYS = ("gateway", "gateway-1")
LEAST, MOST = 2, 4
#: Streams at any time, by gateway, and their tokens.
NUM_CLIENTS, NUM_TOKENS = 4, 100
#: In the logs of a worker that drains, and of a gateway that has changed a role.
_DRAINS, _CHANGES = "finishing what runs", re.compile(r"worker (\S+): ")
_WANTED = re.compile(r"^baton_planner_workers_wanted\b.* (\d+)(?:\.0)?$", re.MULTILINE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def redis() -> AsyncIterator[RedisServer]:
    async with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def seeds() -> Iterator[int]:
    return itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LedCluster]:
    """Two gateways, and workers as many as they want, first a worker of each tier."""
    options = ServeOptions(
        model=str(BOX_MODEL),
        engine="oracle",
        generation_config="none",
        oracle_step_ms=8.0,
        max_num_batched_tokens=64,
        prefill_block_size=32,
        decode_block_size=8,
        num_gpu_blocks_override=2000,
        num_gateways=len(GATEWAYS),
        planner="on",
        slo_ttft_ms=500,
        min_workers=LEAST,
        max_workers=MOST,
        port=0,
        drain_timeout_s=10,
    )
    cluster = LedCluster(options, redis.url, tmp_path_factory.mktemp("wanted") / "wanted")
    cluster.want(LEAST, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.supervisor.cluster._LAST_DELAY_S", 0.5)
        async with cluster:
            yield cluster
    assert not pids_of(redis.url)


@asynccontextmanager
async def streaming(cluster: LedCluster, seeds: Iterator[int]) -> AsyncIterator[None]:
    """Streams by all gateways beside the body; each ends well and is right."""
    is_over = asyncio.Event()

    async def keep_streaming(client: AsyncClient) -> None:
        while not is_over.is_set():
            streams = Streams(client, seed=next(seeds), num_streams=1, num_tokens=NUM_TOKENS)
            assert not await streams.finish()

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(cluster, first)) for first in GATEWAYS]
        group = await stack.enter_async_context(asyncio.TaskGroup())
        for client in clients * NUM_CLIENTS:
            group.create_task(keep_streaming(client))
        for client in clients:
            assert not await Streams(client, seed=next(seeds), num_streams=1).finish()
        yield
        is_over.set()


def client_of(cluster: LedCluster, first: str) -> AsyncClient:
    """It goes on at the other gateway when the first one is lost, however long that takes to come
    back."""
    names = sorted(GATEWAYS, key=lambda name: name != first)
    return AsyncClient(",".join(map(cluster.address_of, names)), max_retries=20)


async def until_there_are(cluster: LedCluster, num_workers: int, num_prefill: int) -> None:
    """Return once there are so many workers in these roles, as both gateways see them, and no other
    number is published. A leader that found so many has none to publish."""
    right = ["decode"] * (num_workers - num_prefill) + ["prefill"] * num_prefill
    while True:
        pages = [await page_of(cluster, name) for name in GATEWAYS]
        said = {int(number) for page in pages for number in _WANTED.findall(page)}
        tiers = [await tiers_at(cluster, name) for name in GATEWAYS]
        is_right = said <= {num_workers} and tiers == [right] * len(GATEWAYS)
        if is_right and len(cluster.worker_names) == num_workers:
            return
        await asyncio.sleep(0.1)


async def page_of(cluster: LedCluster, name: str) -> str:
    """Metrics of a gateway; empty while it is not there."""
    try:
        return await fetch_metrics(int(cluster.report_of(name).http_address.rpartition(":")[2]))
    except (OSError, HTTPException):
        return ""


async def tiers_at(cluster: LedCluster, name: str) -> list[str]:
    """Tiers of the ready workers as a gateway sees them."""
    async with AsyncClient(cluster.address_of(name), max_retries=0) as client:
        try:
            workers = (await client.model()).workers
        except BatonError:
            return []
    return sorted(worker.tier for worker in workers if worker.state == "ready")


async def test_the_next_leader_goes_on_with_the_number(
    cluster: LedCluster, seeds: Iterator[int]
) -> None:
    await until_there_are(cluster, LEAST, 1)
    async with streaming(cluster, seeds):
        cluster.want(MOST, 2)
        await cluster.until_said(MOST)
        killed = cluster.leader
        cluster.kill(killed)
        await until_there_are(cluster, MOST, 2)
        cluster.kill(cluster.leader)
        cluster.want(3, 1)
        await until_there_are(cluster, 3, 1)


async def test_a_registry_that_forgets_everything_ends_no_stream(
    cluster: LedCluster, redis: RedisServer, seeds: Iterator[int]
) -> None:
    cluster.want(LEAST, 1)
    await until_there_are(cluster, LEAST, 1)
    async with streaming(cluster, seeds):
        await redis.stop()
        cluster.want(3, 2)
        async with client_of(cluster, "gateway") as client:
            for _ in range(3):
                assert not await Streams(client, seed=next(seeds)).finish()
        await redis.start()
        await until_there_are(cluster, 3, 2)


async def test_a_worker_dies_while_it_starts(cluster: LedCluster, seeds: Iterator[int]) -> None:
    """First as a process that is not ready, then when gateways are about to find it."""
    cluster.want(LEAST, 1)
    await until_there_are(cluster, LEAST, 1)
    async with streaming(cluster, seeds):
        cluster.want(3, 1)
        await until_started(cluster, "decode-1")
        cluster.kill_at(lambda name, line: name if (name, line) == ("decode-1", "ready") else "")
        cluster.kill("decode-1")
        await cluster.has_killed.wait()
        await until_there_are(cluster, 3, 1)


async def until_started(cluster: LedCluster, name: str) -> None:
    """Return once a worker has a process."""
    while True:
        with suppress(KeyError, RuntimeError):
            cluster.pid_of(name)
            return
        await asyncio.sleep(0.01)


async def test_a_worker_dies_while_it_drains(cluster: LedCluster, seeds: Iterator[int]) -> None:
    cluster.want(3, 1)
    await until_there_are(cluster, 3, 1)
    async with streaming(cluster, seeds):
        cluster.kill_at(lambda name, line: name if _DRAINS in line else "")
        cluster.want(LEAST, 1)
        await cluster.has_killed.wait()
        await until_there_are(cluster, LEAST, 1)


async def test_a_worker_dies_while_it_changes_its_role(
    cluster: LedCluster, seeds: Iterator[int]
) -> None:
    """What decodes on it is to be handed to others, and it comes back in its first role."""
    cluster.want(3, 1)
    await until_there_are(cluster, 3, 1)
    async with streaming(cluster, seeds):
        cluster.kill_at(lambda _name, line: m[1] if (m := _CHANGES.search(line)) else "")
        cluster.want(3, 2)
        await cluster.has_killed.wait()
        await until_there_are(cluster, 3, 2)
