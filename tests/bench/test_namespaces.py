"""A wire between two hosts; the hosts themselves: tests/integration/test_hosts_under_faults.py."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.namespaces import Wire

Ends = tuple[Wire, socket.socket, socket.socket]


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """A wire, and what its hosts send and receive by."""
    hosts: Any = None, None
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    for device, own in pairs:
        device.setblocking(False)
        own.setblocking(False)
    (device, own), (other_device, other) = pairs
    wire = Wire("wire0", hosts, (device.detach(), other_device.detach()))
    yield wire, own, other
    wire.close()
    own.close()
    other.close()


async def received(end: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(end, 100)


async def test_packets_pass_either_way_in_order(ends: Ends) -> None:
    _, one, other = ends
    for source, target in ((one, other), (other, one)):
        for packet in (b"a", b"b"):
            source.send(packet)
        assert [await received(target) for _ in range(2)] == [b"a", b"b"]


async def test_packets_are_delayed(ends: Ends) -> None:
    wire, one, other = ends
    wire.delay_s = 0.05
    begin_s = time.monotonic()
    one.send(b"a")
    assert await received(other) == b"a"
    assert time.monotonic() >= begin_s + 0.05


async def test_a_share_of_the_packets_is_lost(ends: Ends) -> None:
    wire, one, other = ends
    wire.loss = 0.5
    for _ in range(100):
        one.send(b"a")
        await asyncio.sleep(0)
    wire.loss = 0.0
    one.send(b"end")
    num_passed = 0
    while await received(other) != b"end":
        num_passed += 1
    assert 20 < num_passed < 80
