"""Channels notice frozen and dead peers, and never take a proxy's way."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from baton.errors import NoWorkers, WorkerLost
from baton.rpc.channel import (
    CLIENT_KEEPALIVE_MS,
    KEEPALIVE_MS,
    aio_channel,
    channel_options,
    sync_channel,
)
from baton.rpc.server import RunningServer, server_options, start_server
from baton.rpc.status import from_rpc_error
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.support import fake_inference


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """The fake service in a process of its own; its first line of output is its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fake_inference"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(fake_inference.__file__).parents[2],
    )
    with process:
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_peer_that_stops_is_noticed_in_mid_stream(
    child: subprocess.Popen[str], how: signal.Signals
) -> None:
    assert child.stdout
    async with aio_channel(child.stdout.readline().strip()) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(model="hang"))
        assert (await call.read()).text == "a"
        os.kill(child.pid, how)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert isinstance(from_rpc_error(caught.value), WorkerLost)


async def test_a_proxy_of_the_environment_is_not_used(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with aio_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert (await stub.Tokenize(inference_pb2.TokenizeRequest())).max_model_len == 4096


def test_a_peer_that_is_not_there_is_told_at_once() -> None:
    with sync_channel("127.0.0.1:1") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Tokenize(inference_pb2.TokenizeRequest())
    error = from_rpc_error(caught.value, address="127.0.0.1:1")
    assert isinstance(error, NoWorkers)
    assert error.message.startswith("gateway not reachable at 127.0.0.1:1")


def test_a_gateway_may_stand_still_for_three_seconds() -> None:
    options = dict(channel_options(keepalive_ms=CLIENT_KEEPALIVE_MS))
    for name in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
        assert int(options[name]) > 3000


@pytest.mark.parametrize("keepalive_ms", [KEEPALIVE_MS, CLIENT_KEEPALIVE_MS])
def test_servers_permit_what_channels_do(keepalive_ms: int) -> None:
    client, server = dict(channel_options(keepalive_ms=keepalive_ms)), dict(server_options())
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    assert server["grpc.http2.max_ping_strikes"] == 0
    assert {"grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"} <= client.keys()
    for name in ("grpc.max_receive_message_length", "grpc.max_send_message_length"):
        assert client[name] == server[name]


_WINDOW_BYTES, _PIECE_BYTES, _NUM_PIECES = 16384, 128, 2000


@pytest.mark.slow
async def test_a_window_bounds_what_waits_for_a_slow_reader() -> None:
    num_read = 0
    ahead: list[int] = []

    async def tell(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Pieces, and then one that is larger than the window."""
        for index in range(_NUM_PIECES):
            await context.write(bytes(_PIECE_BYTES))
            ahead.append(index + 1 - num_read)
        await context.write(request * (1 << 20))

    def register(server: grpc.aio.Server) -> Sequence[str]:
        handlers = {"Tell": grpc.unary_stream_rpc_method_handler(tell)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", handlers),))
        return ()

    server = await start_server("127.0.0.1:0", register)
    async with aio_channel(server.address, receive_window_bytes=_WINDOW_BYTES) as channel:
        call: grpc.aio.UnaryStreamCall[bytes, bytes] = channel.unary_stream("/Test/Tell")(b"x")
        for _ in range(_NUM_PIECES):
            assert await call.read() == bytes(_PIECE_BYTES)
            num_read += 1
            for _ in range(20):
                await asyncio.sleep(0)
        assert await call.read() == b"x" * (1 << 20)
    await server.stop()
    # Pieces that the writer's and the reader's threads have at the time are in nobody's window.
    assert max(ahead) <= 2 * _WINDOW_BYTES / _PIECE_BYTES < _NUM_PIECES / 4
