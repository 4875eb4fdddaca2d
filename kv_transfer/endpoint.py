"""Where a worker accepts KV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.kv_transports import KV_TRANSPORTS
from baton.v1 import kv_pb2

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_NUMBERS = {
    each.name: kv_pb2.KvTransport.Value(f"KV_TRANSPORT_{each.name.upper()}")
    for each in KV_TRANSPORTS
}
_NAMES = {number: name for name, number in _NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """transport: its name in baton.kv_transports. address: a Unix socket's path, host:port, or a
    name within the process, by the transport's scope. host_id: only of sockets' paths."""

    transport: str
    address: str
    host_id: str = ""

    def __str__(self) -> str:
        """For people."""
        return f"{self.transport} to {self.address}"


def local_host_id() -> str:
    """The kernel's boot id: equal for processes that may share memory; empty where the kernel gives
    none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def endpoint_to_proto(endpoint: Endpoint) -> kv_pb2.KvEndpoint:
    return kv_pb2.KvEndpoint(
        transport=_NUMBERS[endpoint.transport],
        address=endpoint.address,
        host_id=endpoint.host_id,
    )


def endpoints_from_proto(messages: list[kv_pb2.KvEndpoint]) -> tuple[Endpoint, ...]:
    """The endpoints whose transport this version knows; a newer peer may offer others besides."""
    return tuple(
        Endpoint(_NAMES[message.transport], message.address, message.host_id)
        for message in messages
        if message.transport in _NAMES
    )
