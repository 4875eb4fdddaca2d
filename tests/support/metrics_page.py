"""Prometheus pages: free ports to serve them on, and fetching them."""

from __future__ import annotations

import asyncio
import random
import socket
import urllib.request
from contextlib import suppress
from pathlib import Path

_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10_000


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now, below those that the system gives to whoever asks for any: other
    tests ask for many."""
    first_ephemeral = int(_EPHEMERAL_PORTS.read_text().split()[0])
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(_LOWEST_PORT, first_ephemeral)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return list(ports)


async def fetch_metrics(port: int) -> str:
    """The page that a service of this process serves."""

    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            return str(response.read().decode())

    return await asyncio.to_thread(get)
