"""Links between real processes break, fall silent, and lie: each stream has the oracle's tokens,
each exactly once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from baton.client import AsyncClient
from bench.fault_proxy import FaultProxy, ProxiedCluster, Way, Weather
from tests.support.certificates import Authority, as_options
from tests.support.fault_streams import Streams, proxied_cluster, until_quiet

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SILENT = Weather(is_silent=True)
FLIPPING = Weather(flip_every=5_000)


def cut(link: FaultProxy) -> None:
    link.cut()


def refuse(link: FaultProxy) -> None:
    link.refuse()
    link.cut()


def silence(link: FaultProxy) -> None:
    link.silence()


def silence_one_way(link: FaultProxy) -> None:
    link.weather(there=SILENT)


def half_close(link: FaultProxy) -> None:
    link.half_close(Way.THERE)


def half_close_back(link: FaultProxy) -> None:
    link.half_close(Way.BACK)


def delay(link: FaultProxy) -> None:
    link.weather(Weather(delay_s=0.1), Weather(delay_s=0.02))


def throttle(link: FaultProxy) -> None:
    link.weather(Weather(bytes_per_s=50_000), Weather(bytes_per_s=50_000))


def flip_bits(link: FaultProxy) -> None:
    link.weather(there=FLIPPING)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProxiedCluster]:
    async with proxied_cluster() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def healed(cluster: ProxiedCluster) -> AsyncIterator[AsyncClient]:
    """A client with a sound link to the gateway. Afterwards all links are sound, and nothing is
    held."""
    async with AsyncClient(cluster.address, max_retries=0) as client:
        yield client
        await heal(cluster)
        await until_quiet(client, 4)
        # A fault of a link is not reported as a fault of the software.
        assert not [line for line in cluster.log_lines if " failed: " in line]


async def heal(cluster: ProxiedCluster) -> None:
    for link in cluster.links.values():
        link.heal()
        await link.accept()


FAULTS = (cut, refuse, silence, silence_one_way, half_close, delay)


@pytest.mark.parametrize(
    ("victim", "inject"),
    [
        # Most faults of a prefill worker's link, with younger streams, run in .ci/run; there also
        # silence in one direction, which is noticed as silence in both.
        pytest.param(
            *(victim, inject),
            marks=pytest.mark.long
            if inject is silence_one_way or (victim == "prefill-0" and inject not in (cut, silence))
            else (),
        )
        for victim in ("decode-0", "prefill-0")
        for inject in FAULTS
    ],
)
async def test_of_the_gateway_to_a_worker(
    cluster: ProxiedCluster,
    healed: AsyncClient,
    victim: str,
    inject: Callable[[FaultProxy], None],
) -> None:
    streams = Streams(healed, seed=1)
    await streams.all_run()
    inject(cluster.links[victim])
    later = Streams(healed, seed=2, num_streams=2)
    assert not await streams.finish()
    assert not await later.finish()
    if victim == "decode-0" and inject in (cut, refuse, silence):
        assert streams.num_resumes


@pytest.mark.parametrize("inject", [cut, refuse, delay, throttle, half_close, half_close_back])
async def test_of_kv(
    cluster: ProxiedCluster, healed: AsyncClient, inject: Callable[[FaultProxy], None]
) -> None:
    streams = Streams(healed, seed=3)
    await streams.all_run()
    inject(cluster.links["kv decode-0"])
    later = Streams(healed, seed=4)
    assert not await streams.finish()
    assert not await later.finish()


async def test_flipped_bits_of_kv_are_noticed(cluster: ProxiedCluster, healed: AsyncClient) -> None:
    for name in ("kv decode-0", "kv decode-1"):
        flip_bits(cluster.links[name])
    # Each way is bad, so that a stream may meet more failures than one outlives.
    errors = await Streams(healed, seed=5, num_tokens=20).finish()
    assert {error.reason for error in errors} <= {"HANDOFF_FAILED", "PEER_MISMATCH"}
    assert cluster.links["kv decode-0"].num_flipped + cluster.links["kv decode-1"].num_flipped
    await heal(cluster)
    assert not await Streams(healed, seed=5, num_tokens=20).finish()


@pytest.mark.parametrize("inject", [cut, half_close, half_close_back, delay, throttle])
async def test_of_a_client(
    cluster: ProxiedCluster, healed: AsyncClient, inject: Callable[[FaultProxy], None]
) -> None:
    """A disconnected client gets one error; its work ends, and another client's continues."""
    others = Streams(healed, seed=6, num_streams=2)
    async with AsyncClient(cluster.front, max_retries=0) as client:
        streams = Streams(client, seed=7)
        await streams.all_run()
        inject(cluster.links["gateway"])
        errors = await streams.finish()
    assert bool(errors) == (inject in (cut, half_close, half_close_back))
    assert {error.reason for error in errors} <= {"NO_WORKERS", "WORKER_LOST"}
    assert not await others.finish()


@pytest.mark.long
async def test_flipped_bits_under_tls_are_noticed(tmp_path: Path) -> None:
    """gRPC itself has no checksum: TLS, or TCP's own on a sound network, is what protects
    tokens."""
    files = Authority(tmp_path).files("127.0.0.1")
    options = {**as_options(files), "ssl_cert_reqs": "none"}
    async with (
        proxied_cluster(1, 2, **options) as cluster,
        AsyncClient(cluster.address, tls=files, max_retries=0) as client,
    ):
        streams = Streams(client, seed=8)
        await streams.all_run()
        link = cluster.links["decode-0"]
        link.weather(back=Weather(flip_every=200))
        assert not await streams.finish()
        assert link.num_flipped
        assert streams.num_resumes
        await heal(cluster)
        await until_quiet(client, 3)
