"""Connections are accepted a few per iteration of the event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from gateway.http import server as http_server
from gateway.http.server import Acceptor, start_http
from tests.gateway.http.test_connection import Handler


async def test_many_connections_are_accepted_over_several_iterations() -> None:
    server = await start_http(Handler(), "127.0.0.1", 0)
    connections = server._state.connections
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(40)]
        for client in clients:  # the kernel completes these without the loop
            client.connect(("127.0.0.1", server.port))
        num_before = 0
        while num_before < len(clients):
            await asyncio.sleep(0)
            assert len(connections) - num_before <= http_server._NUM_ACCEPTED
            num_before = len(connections)
    await server.stop()


async def test_the_kernel_buffers_little_unread_output() -> None:
    """Of each accepted connection; twice what was requested, as Linux has it."""
    server = await start_http(Handler(), "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", server.port)):
        async with asyncio.timeout(60):
            while not server._state.connections:
                await asyncio.sleep(0.001)
        (connection,) = server._state.connections
        assert connection._transport is not None
        accepted = connection._transport.get_extra_info("socket")
        size = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert size == 2 * http_server._SEND_BUFFER_BYTES
    await server.stop()


async def test_a_close_leaves_no_connection_that_was_accepted_and_not_begun() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setblocking(False)
        acceptor = Acceptor(sock, asyncio.Protocol, None)
        with socket.create_connection(sock.getsockname()) as client:
            client.settimeout(60)
            acceptor._accept()
            assert len(acceptor._openings) == 1
            acceptor.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not acceptor._openings
            assert client.recv(1) == b"", "it is closed at once, not when memory is collected"


async def test_accepting_goes_on_after_descriptors_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_EXHAUSTED_S", 0.01)
    failures = [OSError(errno.EMFILE, "too many open files")] * 3

    class Scarce(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if failures:
                raise failures.pop()
            return super().accept()

    with Scarce() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        sock.setblocking(False)
        made = asyncio.Event()

        def make() -> asyncio.Protocol:
            made.set()
            return asyncio.Protocol()

        acceptor = Acceptor(sock, make, None)
        with socket.create_connection(sock.getsockname()):
            async with asyncio.timeout(60):
                await made.wait()
        acceptor.close()
        acceptor.close()
    assert not failures
