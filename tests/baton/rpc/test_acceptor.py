"""A server has several calls of each method requested from its core, and none once it has
stopped."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from baton.rpc.acceptor import _NEEDED, _NUM_REQUESTED, _Acceptor
from baton.rpc.channel import aio_channel
from baton.rpc.server import start_server

CHECK = b"/grpc.health.v1.Health/Check"


async def test_many_calls_are_requested_each_is_answered_once_and_none_is_left() -> None:
    running = await start_server("127.0.0.1:0", lambda _: ())
    acceptor: Any = running._server._server
    if not all(hasattr(cygrpc.AioServer, name) for name in _NEEDED):
        await running.stop()
        pytest.skip("this grpc is made otherwise: calls are accepted one by one")
    assert isinstance(acceptor, _Acceptor)
    async with aio_channel(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Check(health_pb2.HealthCheckRequest()) for _ in range(3 * _NUM_REQUESTED)]
        answers = await asyncio.gather(*calls)
        assert [answer.status for answer in answers] == [1] * len(calls)
        num_requested = acceptor._num_requested[CHECK] + len(acceptor._accepted[CHECK])
        assert num_requested == _NUM_REQUESTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/no.Such/Method")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await running.stop()
    while any(acceptor._num_requested.values()):
        await asyncio.sleep(0)
    assert not any(acceptor._accepted.values())
