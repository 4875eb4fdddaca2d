"""Where a worker accepts KV."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from baton.v1 import kv_pb2

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class TransportKind(enum.IntEnum):
    """How bytes reach a worker; numbered as in baton.v1.KvTransport."""

    LOOPBACK = 1
    SHM = 2
    TCP = 3
    NIXL = 4
    CUDA_IPC = 5


@dataclass(frozen=True, slots=True)
class Endpoint:
    """address: a name (LOOPBACK), a Unix socket's path (SHM, CUDA_IPC), or host:port (TCP, NIXL).
    host_id: only of sockets' paths."""

    kind: TransportKind
    address: str
    host_id: str = ""


def local_host_id() -> str:
    """The kernel's boot id: equal for processes that may share memory; empty where the kernel tells
    none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def endpoint_to_proto(endpoint: Endpoint) -> kv_pb2.KvEndpoint:
    return kv_pb2.KvEndpoint(
        transport=kv_pb2.KvTransport.ValueType(endpoint.kind),
        address=endpoint.address,
        host_id=endpoint.host_id,
    )


def endpoints_from_proto(messages: list[kv_pb2.KvEndpoint]) -> tuple[Endpoint, ...]:
    """The endpoints whose transport this version knows; a newer peer may offer others besides."""
    known = frozenset(int(kind) for kind in TransportKind)
    return tuple(
        Endpoint(TransportKind(message.transport), message.address, message.host_id)
        for message in messages
        if message.transport in known
    )
