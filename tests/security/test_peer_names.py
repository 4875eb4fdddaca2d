"""--ssl-peer-names: a certificate of the authority alone does not open the ports that are for
gateways and workers."""

from __future__ import annotations

import select
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.client import AsyncClient, Completion, NoWorkers, SamplingParams, TlsFiles
from baton.config import DecodeOptions, GatewayOptions, PrefillOptions, ServeOptions
from baton.config.load import build_options
from baton.errors import ConfigError, PermissionDenied
from baton.rpc.channel import aio_channel
from baton.rpc.peer_names import check_peer_names
from baton.rpc.status import from_rpc_error
from baton.supervisor.plan import plan_workers
from baton.types import Sampling
from baton.v1 import worker_pb2, worker_pb2_grpc
from engine.oracle import oracle_tokens
from kv_transfer.transport.connection import Connection, TransportError
from kv_transfer.transport.tls import client_contexts, connect_tls
from tests.support.certificates import Authority, as_options
from tests.support.live_tiers import decode_worker, gateway, prefill_worker

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
ANSWER = tuple(oracle_tokens(PROMPT, Sampling(max_tokens=6), 1000))
FLEET = "fleet.test"

NAMES = st.sampled_from(["a.test", "B.test", "spiffe://x/worker", "*.test", "c"])


@pytest.fixture
def fleet(authority: Authority) -> TlsFiles:
    """Certificate files of gateways and workers."""
    return authority.files(FLEET, "127.0.0.1")


@pytest.fixture
def user(authority: Authority) -> TlsFiles:
    """Certificate files of a gateway's client."""
    return authority.files("user.test", "127.0.0.1")


@asynccontextmanager
async def tiers(own: TlsFiles, **others: Any) -> AsyncIterator[tuple[str, str]]:
    """Addresses of a prefill and a decode worker that want a certificate of the fleet. others:
    options of the decode worker."""
    options = {**as_options(own), "ssl_peer_names": (FLEET,), "kv_transport": "tcp"}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(prefill_worker(worker_id="p0", **options))
        yield (
            prefill,
            await enter(
                decode_worker(worker_id="d0", max_local_prefill_tokens=0, **{**options, **others})
            ),
        )


async def ask(prefill: str, decode: str, own: TlsFiles, tls: TlsFiles) -> Completion:
    """Through a gateway that shows `own`, by a client that shows `tls`."""
    async with (
        gateway([prefill], [decode], **as_options(own)) as front,
        AsyncClient(front, tls=tls, timeout_s=30.0) as client,
    ):
        return await client.generate(PROMPT, PARAMS)


@pytest.mark.slow
async def test_a_user_reaches_the_gateway_and_nothing_behind_it(
    fleet: TlsFiles, user: TlsFiles
) -> None:
    async with tiers(fleet) as (prefill, decode):
        done = await ask(prefill, decode, fleet, user)
        assert done.token_ids == ANSWER
        assert done.timing.transfer_bytes > 0, "the tiers work together"
        for address in (prefill, decode):
            async with aio_channel(address, user) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                with pytest.raises(Exception, match=FLEET) as refused:
                    await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=30.0)
                assert isinstance(from_rpc_error(refused.value), PermissionDenied)  # type: ignore[arg-type]
                with pytest.raises(Exception, match=FLEET):
                    await stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=30.0).read()


@pytest.mark.slow
async def test_a_gateway_without_the_name_is_told_why(
    fleet: TlsFiles, user: TlsFiles, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("gateway.server.WORKERS_TIMEOUT_S", 0.5)
    async with tiers(fleet) as (prefill, decode):
        with pytest.raises(NoWorkers):
            await ask(prefill, decode, user, user)
    assert "--ssl-peer-names" in caplog.text


async def test_kv_goes_to_workers_of_the_name_alone(fleet: TlsFiles, user: TlsFiles) -> None:
    """The decode worker has a user's certificate: it computes its prompts itself."""
    async with tiers(fleet, **as_options(user), ssl_peer_names=()) as (prefill, decode):
        done = await ask(prefill, decode, fleet, user)
        assert done.token_ids == ANSWER
        assert done.timing.transfer_bytes == 0


def test_a_receiver_of_kv_hangs_up_on_others(
    make_listener: Any, fleet: TlsFiles, user: TlsFiles
) -> None:
    address = make_listener(fleet, (FLEET,))
    connection = connect_tls(address, 10.0, 10.0, client_contexts(user)(), "")
    with pytest.raises(TransportError, match="closed the connection"):
        until_a_frame(connection)
    connection.close()


def test_a_sender_of_kv_hangs_up_on_others(
    make_listener: Any, fleet: TlsFiles, user: TlsFiles
) -> None:
    address, context = make_listener(user, ()), client_contexts(fleet)()
    with pytest.raises(TransportError, match=r"user\.test"):
        connect_tls(address, 10.0, 10.0, context, "", (FLEET,))


def until_a_frame(connection: Connection) -> None:
    while connection.receive() is None:
        select.select([connection.fileno()], [], [])


@given(st.lists(NAMES, min_size=1), st.lists(NAMES))
def test_one_name_in_common_is_enough_and_needed(wanted: list[str], shown: list[str]) -> None:
    shown = [name.swapcase() for name in shown]
    if {name.lower() for name in wanted} & {name.lower() for name in shown}:
        check_peer_names(wanted, shown)
    else:
        with pytest.raises(PermissionDenied):
            check_peer_names(wanted, shown)


@pytest.mark.parametrize("cls", [PrefillOptions, DecodeOptions, ServeOptions])
def test_names_mean_nothing_without_an_authority(cls: Any) -> None:
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        build_options(cls, {"model": "m", "ssl_peer_names": "a.test"})


def test_serve_passes_the_names_to_its_workers() -> None:
    files = dict.fromkeys(("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"), "some.pem")
    options = build_options(ServeOptions, {"model": "m", **files, "ssl_peer_names": "a,b"})
    for worker in plan_workers(options, 2):
        assert "--ssl-peer-names=a" in " ".join(worker.arguments)
    assert "ssl_peer_names" not in GatewayOptions.model_fields
