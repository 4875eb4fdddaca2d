"""The transports of KV between two workers: what each reaches and needs. Options, help texts, the
doctor, the registry and the KV channel read them here.

The code of a transport is kv_transfer/transport/NAME.py. To add one: that file, its test, a line
of KV_TRANSPORTS, and its number on the wire, KV_TRANSPORT_NAME in protos/baton/v1/kv.proto.
"""

from __future__ import annotations

import enum
import importlib.util
from dataclasses import dataclass

from baton.errors import ConfigError


class Scope(enum.Enum):
    """Reach of a transport. PROCESS: receivers of this process, for tests. HOST: workers with a
    Unix socket that is visible here. NETWORK: any host:port."""

    PROCESS = enum.auto()
    HOST = enum.auto()
    NETWORK = enum.auto()


@dataclass(frozen=True, slots=True)
class KvTransport:
    """One transport. name: as --kv-transport spells it. summary: what KV travels through.

    is_automatic: a worker listens on it by default, if its requirements are met.
    needs_device: KV at both ends is in memory of a CUDA device.
    package: the Python package that it needs; empty for none. install: the command that installs
    it.
    """

    name: str
    scope: Scope
    summary: str
    is_automatic: bool = True
    needs_device: bool = False
    package: str = ""
    install: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether the package that it needs is there."""
        return not self.package or importlib.util.find_spec(self.package) is not None


#: The best first: a sender tries them in this order.
KV_TRANSPORTS = (
    KvTransport("loopback", Scope.PROCESS, "a call within one process", is_automatic=False),
    KvTransport(
        "cuda_ipc",
        Scope.HOST,
        "memory of GPUs, between processes of one host with KV on GPUs",
        needs_device=True,
    ),
    KvTransport("shm", Scope.HOST, "shared memory, between processes of one host"),
    KvTransport(
        "nixl",
        Scope.NETWORK,
        "RDMA, with the library of that name; only where it is asked for",
        is_automatic=False,
        package="nixl",
        install="pip install --no-deps nixl nixl-cu13",
    ),
    KvTransport("tcp", Scope.NETWORK, "TCP"),
)

#: Transports that an option can name.
REMOTE = tuple(each for each in KV_TRANSPORTS if each.scope is not Scope.PROCESS)

#: Lets each pair of workers take the best that both have.
AUTO = "auto"
#: What a worker listens on without being asked to, wherever its KV is.
AUTOMATIC = tuple(
    each.name for each in KV_TRANSPORTS if each.is_automatic and not each.needs_device
)
#: What to take where nothing else works.
FALLBACK = next(
    each.name for each in KV_TRANSPORTS if each.is_automatic and each.scope is Scope.NETWORK
)

#: Slots of a receiver's staging area in memory of its GPU, and their size: each chunk costs
#: launches and a wait, and no cache is to be spared.
DEVICE_NUM_CREDITS = 4
DEVICE_MAX_CHUNK_BYTES = 16 << 20
#: Connections, in or out, that a GPU's memory plan has room for.
PLANNED_CONNECTIONS = 4


def planned_device_bytes() -> int:
    """What KV on its way takes on a GPU: of each connection an area of slots, and a chunk more
    where it passes the host."""
    return PLANNED_CONNECTIONS * (DEVICE_NUM_CREDITS + 1) * DEVICE_MAX_CHUNK_BYTES


_BY_NAME = {each.name: each for each in KV_TRANSPORTS}


def kv_transport(name: str) -> KvTransport:
    """The transport of that name. Raises ConfigError if there is none."""
    if name not in _BY_NAME:
        raise ConfigError.of("kv_transport", name, f"use one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def listened_on(option: str, *, has_device: bool) -> tuple[str, ...]:
    """What a worker with --kv-transport=`option` takes KV by. has_device: its KV is in memory of a
    CUDA device."""
    if option != AUTO:
        return (option,)
    return tuple(
        each.name
        for each in KV_TRANSPORTS
        if each.is_automatic and (has_device or not each.needs_device)
    )


def takes_port(option: str) -> bool:
    """Whether a worker with --kv-transport=`option` listens on --kv-port."""
    names = listened_on(option, has_device=False)
    return any(kv_transport(name).scope is Scope.NETWORK for name in names)
