"""Connections of a proxy that injects faults."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

import pytest

from bench.fault_proxy import FaultProxy


@pytest.mark.slow
@pytest.mark.parametrize("num_turns", range(7))
def test_a_connection_that_comes_while_it_ends_is_closed(num_turns: int) -> None:
    """However far the loop has come with it; a transport that nobody closed warns when it is freed,
    in whichever test runs then."""

    async def connect_and_leave() -> None:
        with socket.socket() as target, socket.socket() as client:
            target.bind(("127.0.0.1", 0))
            target.listen()
            async with FaultProxy(target.getsockname()[1]).running() as proxy:
                client.connect(("127.0.0.1", proxy.port))
                for _ in range(num_turns):
                    await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(connect_and_leave())
        gc.collect()
    assert [str(each.message) for each in found] == []
