"""TLS between the parts of a whole system, and who is kept out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.client import (
    AsyncClient,
    BatonError,
    Client,
    Completion,
    NoWorkers,
    SamplingParams,
    TlsFiles,
)
from baton.rpc.channel import aio_channel
from baton.types import Sampling
from baton.v1 import worker_pb2, worker_pb2_grpc
from bench.fault_proxy import FaultProxy, Weather
from engine.oracle import oracle_tokens
from tests.support.certificates import Authority, as_options
from tests.support.fault_streams import Streams
from tests.support.live_tiers import decode_worker, gateway, prefill_worker

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
ANSWER = tuple(oracle_tokens(PROMPT, Sampling(max_tokens=6), 1000))


@asynccontextmanager
async def system(own: TlsFiles, **gateway_options: Any) -> AsyncIterator[tuple[str, str, str]]:
    """Addresses of a gateway, a prefill and a decode worker, each with `own` certificate."""
    options = as_options(own)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(prefill_worker(worker_id="p0", **options))
        decode = await enter(decode_worker(worker_id="d0", max_local_prefill_tokens=0, **options))
        front = await enter(gateway([prefill], [decode], **{**options, **gateway_options}))
        yield front, prefill, decode


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_tiers_hand_over_in_it(own: TlsFiles, transport: str) -> None:
    options = {**as_options(own), "kv_transport": transport}
    async with (
        prefill_worker(worker_id="p0", **options) as prefill,
        decode_worker(worker_id="d0", max_local_prefill_tokens=0, **options) as decode,
        gateway([prefill], [decode], **as_options(own)) as front,
    ):
        assert (await completion(front, own)).timing.transfer_bytes > 0


async def completion(address: str, tls: TlsFiles | None) -> Completion:
    async with AsyncClient(address, tls=tls, timeout_s=30.0) as client:
        return await client.generate(PROMPT, PARAMS)


async def ask(address: str, tls: TlsFiles | None) -> tuple[int, ...]:
    return (await completion(address, tls)).token_ids


async def worker_answers(address: str, tls: TlsFiles | None) -> bool:
    async with aio_channel(address, tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=30.0)
        code = await call.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
        return code is grpc.StatusCode.OK


@pytest.mark.slow
async def test_flipped_bits_are_noticed(own: TlsFiles) -> None:
    """And cost no stream a token: others of its kind are tests/faults/test_link_faults.py's."""
    options = {**as_options(own), "oracle_step_ms": 2.0}
    async with (
        prefill_worker(worker_id="p0", **options) as prefill,
        decode_worker(worker_id="d0", max_local_prefill_tokens=0, **options) as damaged,
        FaultProxy(int(damaged.rpartition(":")[2])).running() as link,
        gateway([prefill], [f"127.0.0.1:{link.port}"], **as_options(own)) as front,
        AsyncClient(front, tls=own, max_retries=0) as client,
    ):
        streams = Streams(client, seed=1, num_streams=4, num_tokens=200)
        await streams.all_run()
        link.weather(back=Weather(flip_every=200))
        async with asyncio.timeout(60):
            while not link.num_flipped:
                await asyncio.sleep(0.01)
        link.heal()
        assert not await streams.finish()
        assert streams.num_resumes


@pytest.mark.slow
async def test_a_whole_system_over_mutual_tls_and_who_is_kept_out(
    own: TlsFiles, authority: Authority, stranger: Authority
) -> None:
    outsiders = {
        "plain text": None,
        "no certificate": authority.anonymous(),
        "a stranger's certificate": replace(
            stranger.files("127.0.0.1"), ca_certs=authority.ca_certs
        ),
        "trust in a stranger": replace(own, ca_certs=stranger.ca_certs),
    }
    async with system(own) as (front, prefill, decode):
        assert await ask(front, own) == ANSWER
        for address in (prefill, decode):
            assert await worker_answers(address, own)
        # Side by side: a client takes seconds to give up.
        kept_out = await asyncio.gather(
            *(ask(front, tls) for tls in outsiders.values()), return_exceptions=True
        )
        assert [isinstance(end, BatonError) for end in kept_out] == [True] * len(outsiders)
        answered = await asyncio.gather(
            *(worker_answers(at, tls) for tls in outsiders.values() for at in (prefill, decode))
        )
        assert not any(answered)
        assert await ask(front, own) == ANSWER


@pytest.mark.slow
async def test_clients_of_the_gateway_need_no_certificate_where_it_is_told_so(
    own: TlsFiles, authority: Authority
) -> None:
    async with system(own, ssl_cert_reqs="none") as (front, _, decode):
        assert await ask(front, authority.anonymous()) == ANSWER
        assert not await worker_answers(decode, authority.anonymous())


@pytest.mark.slow
async def test_a_certificate_of_another_name_is_taken_only_where_that_name_is_wanted(
    authority: Authority,
) -> None:
    named = authority.files("worker.test")
    async with system(named, ssl_server_name="worker.test") as (front, _, _):
        assert await ask(front, replace(named, server_name="worker.test")) == ANSWER
        with pytest.raises(NoWorkers):
            await ask(front, named)


@pytest.mark.slow
async def test_a_gateway_refuses_workers_that_it_cannot_trust(
    own: TlsFiles, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.server.WORKERS_TIMEOUT_S", 0.5)
    async with (
        decode_worker(worker_id="d0", **as_options(stranger.files("127.0.0.1"))) as decode,
        gateway([], [decode], **as_options(own)) as front,
        AsyncClient(front, tls=own) as client,
    ):
        with pytest.raises(NoWorkers):
            await client.generate(PROMPT, PARAMS)


async def test_tls_for_clients_alone(own: TlsFiles, authority: Authority) -> None:
    """Workers on a network of their own may go without."""
    files = {name: path for name, path in as_options(own).items() if name != "ssl_ca_certs"}
    async with (
        decode_worker(worker_id="d0") as decode,
        gateway([], [decode], **files) as front,
    ):
        assert await ask(front, authority.anonymous()) == ANSWER


@pytest.mark.slow
async def test_the_client_for_threads_speaks_it_too(own: TlsFiles) -> None:
    def ask_in_thread(address: str) -> tuple[int, ...]:
        with Client(address, tls=own) as client:
            assert client.health()
            return client.generate(PROMPT, PARAMS).token_ids

    async with system(own) as (front, _, _):
        assert await asyncio.to_thread(ask_in_thread, front) == ANSWER
