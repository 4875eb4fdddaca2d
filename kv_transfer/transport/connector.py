"""Which of a worker's endpoints a sender takes: the best that works, each tried in turn.

An endpoint that could be connected to, but was lost before the receiver's answer (memory that
cannot be mapped, say), costs one connection its handoffs; for SHUN_S after that it comes last.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from baton.kv_transports import AUTO, KV_TRANSPORTS, KvTransport, Scope, kv_transport
from baton.rpc.tls import TlsFiles
from baton.v1 import kv_pb2
from kv_transfer.device_memory import DeviceMemory
from kv_transfer.frame import Frame
from kv_transfer.ticket import Endpoint, local_host_id
from kv_transfer.transport.base import Hub, TransportConfig, transport_named
from kv_transfer.transport.connection import Connection, Connector, TransportError

#: How long an endpoint that gave no answer comes after all others.
SHUN_S = 60.0

_log = logging.getLogger("baton.kv")


def usable(
    endpoints: Sequence[Endpoint], transport: str, is_reachable: Callable[[Endpoint], bool]
) -> tuple[Endpoint, ...]:
    """The endpoints that may be tried, best first: in the order of KV_TRANSPORTS. `transport` pins
    one, or is "auto"."""
    return tuple(
        endpoint
        for allowed in _allowed(transport)
        for endpoint in endpoints
        if endpoint.transport == allowed.name and is_reachable(endpoint)
    )


def _allowed(transport: str) -> tuple[KvTransport, ...]:
    """Raises ConfigError for a transport that does not exist."""
    return KV_TRANSPORTS if transport == AUTO else (kv_transport(transport),)


def make_connector(
    transport: str = AUTO,
    hub: Hub | None = None,
    send_timeout_s: float = 10.0,
    tls: TlsFiles | None = None,
    clock: Callable[[], float] = time.monotonic,
    peer_names: Sequence[str] = (),
    memory: DeviceMemory | None = None,
) -> Connector:
    """A connector for `transport`: "auto", or one of baton.kv_transports. Raises ConfigError for
    others.

    hub, send_timeout_s, tls, peer_names, memory: see TransportConfig.
    """
    config = TransportConfig(
        send_timeout_s=send_timeout_s,
        tls=tls,
        peer_names=tuple(peer_names),
        memory=memory,
        hub=hub,
    )
    host_id = local_host_id()
    shunned = Shunned(clock)
    dialers = {
        each.name: transport_named(each.name).dialer(config)
        for each in _allowed(transport)
        if each.is_installed
        and (memory or not each.needs_device)
        and (hub or each.scope is not Scope.PROCESS)
    }

    def why_not(endpoint: Endpoint) -> str:
        """Why an endpoint cannot be tried; empty if it can."""
        if endpoint.transport not in dialers:
            return f"this worker has no {endpoint.transport}"
        match kv_transport(endpoint.transport).scope:
            case Scope.PROCESS:
                is_here = hub is not None and hub.has(endpoint.address)
                return "" if is_here else "it is of another process"
            case Scope.HOST:
                return _why_not_here(endpoint, host_id)
            case Scope.NETWORK:
                return ""

    def connect(endpoints: Sequence[Endpoint], timeout_s: float) -> Connection:
        faults = []
        tried = usable(endpoints, transport, lambda endpoint: not why_not(endpoint))
        for endpoint in sorted(tried, key=shunned.has):
            try:
                connection = dialers[endpoint.transport](endpoint.address, timeout_s)
            except TransportError as error:
                faults.append(error.message)
                continue
            if faults:
                _log.warning("KV goes over %s: %s", endpoint, "; ".join(faults))
            else:
                better = _before(endpoints, transport, endpoint)
                reasons = "".join(f"; not over {each}: {why_not(each)}" for each in better)
                _log.info("KV goes over %s%s", endpoint, reasons)
            return WatchedConnection(connection, endpoint, shunned)
        offered = ", ".join(map(str, endpoints)) or "nothing"
        raise TransportError(
            f"no connection over {transport} to a worker that offers {offered}"
            + "".join(f"; {fault}" for fault in faults)
        )

    return connect


def _before(endpoints: Sequence[Endpoint], transport: str, chosen: Endpoint) -> Iterator[Endpoint]:
    """Those that would have come before the one that was taken, could they be reached."""
    return itertools.takewhile(chosen.__ne__, usable(endpoints, transport, lambda _: True))


def _why_not_here(endpoint: Endpoint, host_id: str) -> str:
    """Why a socket of a host cannot be tried from here; another container of the host may not see
    it."""
    if not host_id or endpoint.host_id != host_id:
        return "it is on another host"
    try:
        return "" if Path(endpoint.address).is_socket() else "its socket is not seen from here"
    except (OSError, ValueError) as error:
        return f"its socket cannot be looked for ({error})"


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
        self.send = connection.send
        self.receive = self._await_answer
        self.stage = connection.stage
        self.unstage = connection.unstage
        self.flush = connection.flush
        self.seal = connection.seal
        self.fileno = connection.fileno

    def _await_answer(self) -> Frame | None:
        frame = self._connection.receive()
        if isinstance(frame, kv_pb2.KvAccept | kv_pb2.KvRefuse):
            self._is_answered = True
            self.receive = self._connection.receive
        return frame

    def close(self) -> None:
        if not self._is_answered:
            text = "KV over %s got no answer: this way is tried last for %g s"
            _log.warning(text, self._endpoint, SHUN_S)
            self._shunned.add(self._endpoint)
        self._connection.close()
