"""Which of a worker's endpoints a sender takes: the best that works, each tried in turn.

An endpoint that could be connected to, but was lost before the receiver's answer (memory that
cannot be mapped, say), costs one connection its handoffs; for SHUN_S after that it comes last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.errors import ConfigError
from baton.rpc.tls import TlsFiles
from baton.v1 import kv_pb2
from kv_transfer.device_memory import DeviceMemory
from kv_transfer.endpoint import Endpoint, TransportKind, local_host_id
from kv_transfer.frame import Frame
from kv_transfer.transport.base import Connection, Connector, Staged, TransportError
from kv_transfer.transport.cuda_ipc import connect_cuda_ipc
from kv_transfer.transport.loopback import LoopbackHub
from kv_transfer.transport.nixl import Quarantine, connect_nixl, has_nixl
from kv_transfer.transport.shm import connect_shm
from kv_transfer.transport.tcp import connect_tcp
from kv_transfer.transport.tls import client_contexts, connect_tls

_ALLOWED = {
    "auto": frozenset(TransportKind),
    "loopback": frozenset({TransportKind.LOOPBACK}),
    "shm": frozenset({TransportKind.SHM}),
    "tcp": frozenset({TransportKind.TCP}),
    "nixl": frozenset({TransportKind.NIXL}),
    "cuda_ipc": frozenset({TransportKind.CUDA_IPC}),
}
_ORDER = (
    TransportKind.LOOPBACK,
    TransportKind.CUDA_IPC,
    TransportKind.SHM,
    TransportKind.NIXL,
    TransportKind.TCP,
)

#: How long an endpoint that gave no answer comes after all others.
SHUN_S = 60.0

_log = logging.getLogger("baton.kv")


def usable(
    endpoints: Sequence[Endpoint], transport: str, is_reachable: Callable[[Endpoint], bool]
) -> tuple[Endpoint, ...]:
    """The endpoints that may be tried, best first: see _ORDER. `transport` pins one, or is
    "auto"."""
    allowed = _ALLOWED[transport]
    return tuple(
        sorted(
            (e for e in endpoints if e.kind in allowed and is_reachable(e)),
            key=lambda e: _ORDER.index(e.kind),
        )
    )


def make_connector(
    transport: str = "auto",
    hub: LoopbackHub | None = None,
    send_timeout_s: float = 10.0,
    tls: TlsFiles | None = None,
    clock: Callable[[], float] = time.monotonic,
    peer_names: Sequence[str] = (),
    memory: DeviceMemory | None = None,
) -> Connector:
    """A connector for `transport`: "auto", "loopback" (within `hub`), "shm", "tcp", "nixl" or
    "cuda_ipc". Raises ConfigError for others.

    tls: of tcp; None for plain text. peer_names: see connect_tls. memory: of the device that the
    sender's KV is on; None if that is none, so that there is no cuda_ipc.
    """
    if transport not in _ALLOWED:
        raise ConfigError.of("kv_transport", transport, f"use one of {', '.join(_ALLOWED)}")
    host_id = local_host_id()
    quarantine = Quarantine()
    shunned = Shunned(clock)
    contexts = client_contexts(tls) if tls else None
    server_name = tls.server_name if tls else ""

    def is_reachable(endpoint: Endpoint) -> bool:
        match endpoint.kind:
            case TransportKind.LOOPBACK:
                return hub is not None and hub.has(endpoint.address)
            case TransportKind.SHM:
                return bool(host_id) and _is_here(endpoint, host_id)
            case TransportKind.CUDA_IPC:
                return memory is not None and bool(host_id) and _is_here(endpoint, host_id)
            case TransportKind.TCP:
                return True
            case TransportKind.NIXL:
                return has_nixl()

    def open_one(endpoint: Endpoint, timeout_s: float) -> Connection:
        match endpoint.kind:
            case TransportKind.SHM:
                return connect_shm(endpoint.address, timeout_s, send_timeout_s)
            case TransportKind.CUDA_IPC if memory:
                return connect_cuda_ipc(endpoint.address, timeout_s, send_timeout_s, memory)
            case TransportKind.CUDA_IPC:
                raise TransportError("KV here is in no device's memory")
            case TransportKind.TCP if contexts:
                return connect_tls(
                    endpoint.address,
                    timeout_s,
                    send_timeout_s,
                    contexts(),
                    server_name,
                    peer_names,
                )
            case TransportKind.TCP:
                return connect_tcp(endpoint.address, timeout_s, send_timeout_s)
            case TransportKind.NIXL:
                return connect_nixl(endpoint.address, timeout_s, send_timeout_s, quarantine)
            case TransportKind.LOOPBACK:
                return (hub or LoopbackHub()).connect(endpoint.address)

    def connect(endpoints: Sequence[Endpoint], timeout_s: float) -> Connection:
        faults = []
        tried = usable(endpoints, transport, is_reachable)
        for endpoint in sorted(tried, key=shunned.has):
            try:
                connection = open_one(endpoint, timeout_s)
            except TransportError as error:
                faults.append(error.message)
                continue
            _log_choice(endpoint, faults)
            return WatchedConnection(connection, endpoint, shunned)
        offered = ", ".join(map(_told, endpoints)) or "nothing"
        raise TransportError(
            f"no connection over {transport} to a worker that offers {offered}"
            + "".join(f"; {fault}" for fault in faults)
        )

    return connect


def _is_here(endpoint: Endpoint, host_id: str) -> bool:
    """Whether the socket's path exists on this host; another container of the host may not see
    it."""
    try:
        return endpoint.host_id == host_id and Path(endpoint.address).is_socket()
    except (OSError, ValueError):
        return False


def _log_choice(endpoint: Endpoint, faults: Sequence[str]) -> None:
    if faults:
        _log.warning("KV goes over %s: %s", _told(endpoint), "; ".join(faults))
    else:
        _log.info("KV goes over %s", _told(endpoint))


def _told(endpoint: Endpoint) -> str:
    """For people."""
    return f"{endpoint.kind.name.lower()} to {endpoint.address}"


class Shunned:
    """Endpoints that gave no answer, each for SHUN_S. Lanes' threads share it: of two that add at
    once, one may be forgotten, which costs a connection."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[Endpoint, float] = {}

    def add(self, endpoint: Endpoint) -> None:
        now = self._clock()
        self._until = {e: until for e, until in self._until.items() if until > now}
        self._until[endpoint] = now + SHUN_S

    def has(self, endpoint: Endpoint) -> bool:
        return self._until.get(endpoint, 0.0) > self._clock()


class WatchedConnection:
    """A connection whose endpoint is shunned if it ends without an answer to KvHello. See
    Connection."""

    def __init__(self, connection: Connection, endpoint: Endpoint, shunned: Shunned) -> None:
        self._connection = connection
        self._endpoint = endpoint
        self._shunned = shunned
        self._is_answered = False
        self.stage = connection.stage
        self.unstage = connection.unstage
        self.seal = connection.seal
        self.fileno = connection.fileno

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        self._connection.send(frame, staged, more=more)

    def receive(self) -> Frame | None:
        frame = self._connection.receive()
        self._is_answered |= isinstance(frame, kv_pb2.KvAccept | kv_pb2.KvRefuse)
        return frame

    def close(self) -> None:
        if not self._is_answered:
            text = "KV over %s got no answer: this way is tried last for %g s"
            _log.warning(text, _told(self._endpoint), SHUN_S)
            self._shunned.add(self._endpoint)
        self._connection.close()
