"""A worker's receiving side: its tickets, and a listener of each transport that it offers."""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.errors import ConfigError, HandoffFailed
from baton.kv_transports import (
    AUTOMATIC,
    DEVICE_MAX_CHUNK_BYTES,
    DEVICE_NUM_CREDITS,
    FALLBACK,
    KvTransport,
    Scope,
    kv_transport,
)
from baton.rpc.bind import bind_fault
from baton.rpc.tls import TlsFiles
from baton.types import ANY_NUMERICS, NumericsRule, WorkerIdentity
from engine.interface import KvPool
from kv_transfer.device_memory import OnDeviceLost, device_memory_of, raise_device_lost
from kv_transfer.handshake import ReceiverConfig
from kv_transfer.kv_secret import KvSecret
from kv_transfer.receiver import Receiver
from kv_transfer.ticket import Endpoint, TicketEvent
from kv_transfer.ticket_table import TicketTable
from kv_transfer.transport.base import Hub, Listener, TransportConfig, transport_named
from kv_transfer.wire_format import most_token_layer_bytes

#: One is filled while another is read, and the third bridges a wake-up; large enough that a chunk's
#: fixed cost is little, all together small enough to stay in a CPU's last cache.
DEFAULT_NUM_CREDITS = 3
DEFAULT_MAX_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class RunningReceiver:
    """A worker's tickets and its open endpoints.

    `close` ends connections and threads, then aborts the tickets that are still open."""

    tickets: TicketTable
    receiver: Receiver
    listeners: tuple[Listener, ...]

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(listener.endpoint for listener in self.listeners)

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        self.tickets.abort_all(HandoffFailed.reason, "the worker is shutting down")


def open_receiver(
    identity: WorkerIdentity,
    pool: KvPool,
    on_event: Callable[[TicketEvent], None],
    clock: Callable[[], float],
    *,
    transports: Sequence[str] = AUTOMATIC,
    lease_s: float = 30.0,
    offer_s: float = math.inf,
    tcp_host: str = "127.0.0.1",
    tcp_port: int = 0,
    tcp_advertise_address: str = "",
    hub: Hub | None = None,
    num_credits: int | None = None,
    max_chunk_bytes: int | None = None,
    wire_dtype: str = "auto",
    secret: bytes = b"",
    kv_secret: KvSecret | None = None,
    rule: NumericsRule = ANY_NUMERICS,
    on_device_lost: OnDeviceLost = raise_device_lost,
    tls: TlsFiles | None = None,
    peer_names: Sequence[str] = (),
    draw_id: Callable[[], int] | None = None,
) -> RunningReceiver:
    """Bind, then serve. transports: names of baton.kv_transports. tcp_host, tcp_port,
    tcp_advertise_address: of those that reach the network. hub, tls, peer_names: see
    TransportConfig.

    lease_s, offer_s: see TicketTable. secret: of the tickets' digests; drawn anew if none is given.
    Each connection has num_credits * max_chunk_bytes of shared memory, or max_chunk_bytes of
    buffer; if not given, they are what suits memory of the host, or of a device. wire_dtype,
    kv_secret, rule, on_device_lost: see ReceiverConfig. Raises ConfigError for an unknown
    transport, or one that cannot be bound.
    """
    config = TransportConfig(
        worker_id=identity.worker_id,
        host=tcp_host,
        port=tcp_port,
        advertise_address=tcp_advertise_address,
        tls=tls,
        peer_names=tuple(peer_names),
        memory=device_memory_of(pool),
        hub=hub,
    )
    is_host = config.memory is None
    default_credits = DEFAULT_NUM_CREDITS if is_host else DEVICE_NUM_CREDITS
    default_chunk_bytes = DEFAULT_MAX_CHUNK_BYTES if is_host else DEVICE_MAX_CHUNK_BYTES
    listeners: list[Listener] = []
    with contextlib.ExitStack() as undo:
        for transport in transports:
            listener = _listen(kv_transport(transport), config)
            undo.callback(listener.close)
            listeners.append(listener)
        tickets = TicketTable(
            identity,
            pool.layout,
            tuple(listener.endpoint for listener in listeners),
            lease_s,
            on_event,
            clock,
            secret or secrets.token_bytes(32),
            draw_id or functools.partial(secrets.randbits, 64),
            offer_s,
            pool.mark,
        )
        offered = ReceiverConfig(
            identity,
            pool,
            default_credits if num_credits is None else num_credits,
            max(max_chunk_bytes or default_chunk_bytes, most_token_layer_bytes(pool.layout)),
            wire_dtype,
            kv_secret,
            rule,
            on_device_lost,
        )
        receiver = Receiver(offered, tickets)
        for listener in listeners:
            listener.serve(receiver)
        undo.pop_all()
    return RunningReceiver(tickets, receiver, tuple(listeners))


def _listen(transport: KvTransport, config: TransportConfig) -> Listener:
    listen = transport_named(transport.name).listen
    try:
        return listen(config)
    except OSError as error:
        if transport.scope is Scope.HOST:
            folder = tempfile.gettempdir()
            fix = f"no Unix socket there ({error}); set TMPDIR to a short path that can be written"
            fix = f"{fix}, or give --kv-transport={FALLBACK}"
            raise ConfigError.of("TMPDIR", folder, fix) from error
        fault = bind_fault(config.host, config.port, "kv_host", "kv_port")
        fallback = ConfigError.of("kv_host", config.host, f"cannot listen there ({error})")
        raise fault or fallback from error
