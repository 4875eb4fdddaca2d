"""A cluster of real processes with a fault proxy on every link between them, and before the
gateway."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from dataclasses import replace

from baton.config import ServeOptions
from baton.supervisor import Cluster
from baton.supervisor.log_lines import forward_to_stderr
from baton.supervisor.plan import ChildSpec
from bench.fault_proxy import FaultProxy


class ProxiedCluster(Cluster):
    """Links are named by who is called: a worker's name for the gateway's way to it, "kv " and its
    name for other workers' way to its KV channel, "gateway" for the clients' way in. --kv-transport
    must be tcp."""

    def __init__(self, options: ServeOptions) -> None:
        super().__init__(options, on_line=self._take_line)
        self.log_lines: list[str] = []
        """All that the processes have logged; it goes to this process's error output, too."""
        self._stack = AsyncExitStack()
        self.links: dict[str, FaultProxy] = {}

    @property
    def front(self) -> str:
        """host:port at which clients find the gateway."""
        return f"127.0.0.1:{self.links['gateway'].port}"

    async def start(self) -> None:
        await super().start()
        await self._link("gateway", int(self.address.rpartition(":")[2]))

    async def stop(self) -> None:
        # First the links: a worker that is told to go must not wait for what a proxy keeps back.
        await self._stack.aclose()
        await super().stop()

    def _take_line(self, name: str, line: str) -> None:
        self.log_lines.append(line)
        forward_to_stderr(name, line)

    async def _start_all(
        self, workers: tuple[ChildSpec, ...], gateways: tuple[ChildSpec, ...]
    ) -> None:
        linked = [await self._with_kv_link(spec) for spec in workers]
        await super()._start_all(tuple(linked), gateways)

    async def _address_for_gateways(self, name: str, address: str) -> str:
        proxy = await self._link(name, int(address.rpartition(":")[2]))
        return f"127.0.0.1:{proxy.port}"

    async def _with_kv_link(self, spec: ChildSpec) -> ChildSpec:
        port = _free_port()
        proxy = await self._link(f"kv {spec.name}", port)
        told = (f"--kv-port={port}", f"--kv-advertise-address=127.0.0.1:{proxy.port}")
        return replace(spec, arguments=(*told, *spec.arguments))

    async def _link(self, name: str, target_port: int) -> FaultProxy:
        proxy = FaultProxy(target_port, seed=len(self.links))
        self.links[name] = await self._stack.enter_async_context(proxy.running())
        return proxy


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
