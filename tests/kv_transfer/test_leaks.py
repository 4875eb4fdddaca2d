"""No thread, file descriptor or socket file outlives close."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from baton.kv_transports import Scope, kv_transport
from tests.support.kv_transports import REMOTE


def footprint() -> tuple[int, set[threading.Thread]]:
    return len(os.listdir("/proc/self/fd")), set(threading.enumerate())


@pytest.mark.slow
@pytest.mark.parametrize("transport", REMOTE)
def test_fifty_connections_leave_nothing(make_rig, transport):
    before = footprint()
    for _ in range(50):
        rig = make_rig(transport)
        ticket = rig.offer((0, 1), 0, 6)
        rig.sender.begin("k", ticket.data)
        rig.send_all("k", (3, 2), 6)
        assert rig.done().error is None
        names = {thread.name for thread in set(threading.enumerate()) - before[1]}
        assert all(name.startswith("baton-kv-") for name in names)
        rig.close()
        for endpoint in rig.running.endpoints:
            if kv_transport(endpoint.transport).scope is Scope.HOST:
                assert not Path(endpoint.address).parent.exists()
    assert footprint() == before


@pytest.mark.parametrize("transport", REMOTE)
def test_a_lane_that_is_idle_ends_by_itself(make_rig, transport):
    before = set(threading.enumerate())
    rig = make_rig(transport, idle_timeout_s=0.01)
    for key in ("a", "b"):
        ticket = rig.offer((0, 1), 0, 6)
        rig.sender.begin(key, ticket.data)
        rig.send_all(key, (3, 2), 6)
        assert rig.done().error is None
        for thread in set(threading.enumerate()) - before:
            if "send" in thread.name or "receive" in thread.name:
                thread.join()


@pytest.mark.parametrize("transport", REMOTE)
def test_hostile_connections_leave_nothing_and_disturb_nobody(make_rig, transport):
    rig = make_rig(transport)
    address = rig.running.endpoints[0].address
    for data in [b"", b"GET / HTTP/1.1\r\n\r\n", b"BTKV" + b"\xff" * 40, os.urandom(100)]:
        if ":" in address:
            host, port = address.split(":")
            hostile = socket.create_connection((host, int(port)))
        else:
            hostile = socket.socket(socket.AF_UNIX)
            hostile.connect(address)
        # The receiver may end the connection before all is said.
        with hostile, contextlib.suppress(OSError):
            hostile.sendall(data)
            hostile.shutdown(socket.SHUT_WR)
            assert hostile.recv(100) == b""
    ticket = rig.offer((0, 1), 0, 6)
    rig.sender.begin("k", ticket.data)
    rig.send_all("k", (3, 2), 6)
    assert rig.done().error is None
