"""Receiving side of a worker: its tickets, and a listener for each offered transport."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
from kv_transfer.device_memory import device_memory_of
from kv_transfer.handshake import ReceiverConfig
from kv_transfer.receiver import Receiver
from kv_transfer.ticket import Endpoint, TicketEvent
from kv_transfer.ticket_table import TicketRules, TicketTable
from kv_transfer.transport.base import Listener, TransportConfig, transport_named
from kv_transfer.wire_format import most_token_layer_bytes

#: One credit is filled while another is read, and a third bridges a wake-up. Chunks are large
#: enough to amortise fixed costs, and all credits together fit into a CPU's last-level cache.
DEFAULT_NUM_CREDITS = 3
DEFAULT_MAX_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class RunningReceiver:
    """A worker's tickets and its open endpoints.

    `close` ends connections and threads, then aborts tickets still open.
    """

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
    config: ReceiverConfig,
    on_event: Callable[[TicketEvent], None],
    clock: Callable[[], float],
    *,
    transports: Sequence[str] = AUTOMATIC,
    listen: TransportConfig = TransportConfig(),  # noqa: B008, it is frozen
    rules: TicketRules | None = None,
) -> RunningReceiver:
    """Bind and serve.

    transports: names in baton.kv_transports.
    listen: addresses; its memory is replaced by that of `config`, and so is its worker_id, by
    default.
    on_event, clock: see TicketTable.
    rules: by default, TicketRules() with its own secret.
    Raises ConfigError for an unknown transport, or one that cannot be bound.
    """
    identity, pool = config.identity, config.pool
    memory = device_memory_of(pool)
    listen = replace(listen, worker_id=listen.worker_id or identity.worker_id, memory=memory)
    listeners: list[Listener] = []
    with contextlib.ExitStack() as undo:
        for transport in transports:
            listener = _listen(kv_transport(transport), listen)
            undo.callback(listener.close)
            listeners.append(listener)
        endpoints = tuple(listener.endpoint for listener in listeners)
        tickets = TicketTable(
            *(identity, pool.layout, endpoints, rules or TicketRules(), on_event, clock),
            *(pool.mark, config.part),
        )
        receiver = Receiver(_with_staging(config, on_device=memory is not None), tickets)
        for listener in listeners:
            listener.serve(receiver)
        undo.pop_all()
    return RunningReceiver(tickets, receiver, tuple(listeners))


def _with_staging(config: ReceiverConfig, *, on_device: bool) -> ReceiverConfig:
    """Set the default staging sizes where `config` has none. A chunk holds at least one token of
    one layer."""
    num_credits = DEVICE_NUM_CREDITS if on_device else DEFAULT_NUM_CREDITS
    chunk_bytes = DEVICE_MAX_CHUNK_BYTES if on_device else DEFAULT_MAX_CHUNK_BYTES
    least_bytes = most_token_layer_bytes(config.pool.layout)
    return replace(
        config,
        num_credits=config.num_credits or num_credits,
        max_chunk_bytes=max(config.max_chunk_bytes or chunk_bytes, least_bytes),
    )


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
