"""Prometheus pages: free ports to serve them on, and fetching them."""

from __future__ import annotations

import asyncio
import socket
import urllib.request


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


async def fetch_metrics(port: int) -> str:
    """The page that a service of this process serves."""

    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            return str(response.read().decode())

    return await asyncio.to_thread(get)
