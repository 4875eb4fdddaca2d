"""Which of a worker's endpoints a sender takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.errors import ConfigError
from baton.rpc.tls import TlsFiles
from kv_transfer.endpoint import Endpoint, TransportKind, local_host_id
from kv_transfer.transport.base import Connection, Connector, TransportError
from kv_transfer.transport.loopback import LoopbackHub
from kv_transfer.transport.nixl import Quarantine, connect_nixl, has_nixl
from kv_transfer.transport.shm import connect_shm
from kv_transfer.transport.tcp import connect_tcp
from kv_transfer.transport.tls import client_context, connect_tls

_ALLOWED = {
    "auto": frozenset(TransportKind),
    "loopback": frozenset({TransportKind.LOOPBACK}),
    "shm": frozenset({TransportKind.SHM}),
    "tcp": frozenset({TransportKind.TCP}),
    "nixl": frozenset({TransportKind.NIXL}),
}
_ORDER = (TransportKind.LOOPBACK, TransportKind.SHM, TransportKind.NIXL, TransportKind.TCP)

_log = logging.getLogger("baton.kv")


def usable(
    endpoints: Sequence[Endpoint], transport: str, is_reachable: Callable[[Endpoint], bool]
) -> tuple[Endpoint, ...]:
    """The endpoints that may be tried, best first: see _ORDER. `transport` pins one, or is "auto"."""
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
) -> Connector:
    """A connector for `transport`: "auto", "loopback" (within `hub`), "shm", "tcp" or "nixl". Raises ConfigError for others.

    tls: of tcp; None for plain text.
    """
    if transport not in _ALLOWED:
        raise ConfigError.of("kv_transport", transport, f"use one of {', '.join(_ALLOWED)}")
    host_id = local_host_id()
    quarantine = Quarantine()
    context = client_context(tls) if tls else None
    server_name = tls.server_name if tls else ""

    def is_reachable(endpoint: Endpoint) -> bool:
        match endpoint.kind:
            case TransportKind.LOOPBACK:
                return hub is not None and hub.has(endpoint.address)
            case TransportKind.SHM:
                return bool(host_id) and _is_here(endpoint, host_id)
            case TransportKind.TCP:
                return True
            case TransportKind.NIXL:
                return has_nixl()

    def open_one(endpoint: Endpoint, timeout_s: float) -> Connection:
        match endpoint.kind:
            case TransportKind.SHM:
                return connect_shm(endpoint.address, timeout_s, send_timeout_s)
            case TransportKind.TCP if context:
                return connect_tls(
                    endpoint.address, timeout_s, send_timeout_s, context, server_name
                )
            case TransportKind.TCP:
                return connect_tcp(endpoint.address, timeout_s, send_timeout_s)
            case TransportKind.NIXL:
                return connect_nixl(endpoint.address, timeout_s, send_timeout_s, quarantine)
            case TransportKind.LOOPBACK:
                return (hub or LoopbackHub()).connect(endpoint.address)

    def connect(endpoints: Sequence[Endpoint], timeout_s: float) -> Connection:
        faults = []
        for endpoint in usable(endpoints, transport, is_reachable):
            try:
                connection = open_one(endpoint, timeout_s)
            except TransportError as error:
                faults.append(error.message)
                continue
            _log.info("KV goes over %s to %s", endpoint.kind.name.lower(), endpoint.address)
            return connection
        offered = ", ".join(f"{e.kind.name.lower()} {e.address}" for e in endpoints) or "nothing"
        raise TransportError(
            f"no connection over {transport} to a worker that offers {offered}"
            + "".join(f"; {fault}" for fault in faults)
        )

    return connect


def _is_here(endpoint: Endpoint, host_id: str) -> bool:
    """Whether the socket's path exists on this host; another container of the host may not see it."""
    try:
        return endpoint.host_id == host_id and Path(endpoint.address).is_socket()
    except (OSError, ValueError):
        return False
