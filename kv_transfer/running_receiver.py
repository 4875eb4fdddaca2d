"""All of the receiving side of one worker, put together: what the decode tier opens and closes."""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.engine.interface import KvPool
from baton.errors import ConfigError, HandoffFailed
from baton.rpc.bind import bind_fault
from baton.rpc.tls import TlsFiles
from baton.types import ANY_NUMERICS, NumericsRule, WorkerIdentity
from kv_transfer.device_memory import device_memory_of
from kv_transfer.endpoint import Endpoint
from kv_transfer.kv_secret import KvSecret
from kv_transfer.receiver import Receiver
from kv_transfer.ticket import TicketEvent
from kv_transfer.ticket_table import TicketTable
from kv_transfer.transport.cuda_ipc import listen_cuda_ipc
from kv_transfer.transport.loopback import LoopbackHub
from kv_transfer.transport.nixl import listen_nixl
from kv_transfer.transport.shm import listen_shm
from kv_transfer.transport.tcp import listen_tcp
from kv_transfer.transport.tls import listen_tls, server_contexts
from kv_transfer.wire_format import most_token_layer_bytes

#: Large enough that a chunk's fixed cost is little, all together small enough to stay in a CPU's
#: last cache.
DEFAULT_NUM_CREDITS = 4
DEFAULT_MAX_CHUNK_BYTES = 2 << 20
#: For KV on a device, where each chunk costs launches and a wait, and no cache is to be spared.
DEVICE_MAX_CHUNK_BYTES = 16 << 20


#: What senders may choose from, unless one is pinned.
_TRANSPORTS = ("shm", "tcp")


def transports_of(option: str, pool: KvPool) -> tuple[str, ...]:
    """What a worker with that pool listens on with --kv-transport=`option`: all that need nothing
    else, for "auto"."""
    if option != "auto":
        return (option,)
    return _TRANSPORTS if device_memory_of(pool) is None else ("cuda_ipc", *_TRANSPORTS)


class Listener(Protocol):
    """A bound address that serves connections from `serve` to `close`."""

    @property
    def endpoint(self) -> Endpoint: ...

    def serve(self, receiver: Receiver) -> None: ...

    def close(self) -> None: ...


#: Binds to a host and a port; the third is the host:port that senders are told, if not that one.
ListenAt = Callable[[str, int, str], Listener]


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
    transports: Sequence[str] = _TRANSPORTS,
    lease_s: float = 30.0,
    offer_s: float = math.inf,
    tcp_host: str = "127.0.0.1",
    tcp_port: int = 0,
    tcp_advertise_address: str = "",
    hub: LoopbackHub | None = None,
    num_credits: int = DEFAULT_NUM_CREDITS,
    max_chunk_bytes: int | None = None,
    wire_dtype: str = "auto",
    secret: bytes = b"",
    kv_secret: KvSecret | None = None,
    rule: NumericsRule = ANY_NUMERICS,
    tls: TlsFiles | None = None,
    peer_names: Sequence[str] = (),
    draw_id: Callable[[], int] = lambda: secrets.randbits(64),
) -> RunningReceiver:
    """Bind, then serve. transports: any of "loopback" (its name is the worker's id, in `hub`),
    "shm", "tcp", "nixl" and "cuda_ipc" (of a pool on a device).

    lease_s, offer_s: see TicketTable. secret: of the tickets' digests; drawn anew if none is given.
    Each connection has num_credits * max_chunk_bytes of shared memory, or max_chunk_bytes of
    buffer. wire_dtype, kv_secret, rule: see Receiver. tls: of tcp; None for plain text. peer_names:
    see listen_tls. Raises ConfigError for an unknown transport, or one that cannot be bound.
    """
    over_tcp: ListenAt = listen_tcp
    if tls:
        over_tcp = functools.partial(
            listen_tls, contexts=server_contexts(tls), peer_names=peer_names
        )
    address = (tcp_host, tcp_port, tcp_advertise_address)
    listeners: list[Listener] = []
    with contextlib.ExitStack() as undo:
        for transport in transports:
            listener = _listen(transport, identity, pool, over_tcp, address, hub)
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
            draw_id,
            offer_s,
        )
        receiver = Receiver(
            identity,
            pool.layout,
            pool,
            tickets,
            num_credits,
            max(max_chunk_bytes or _chunk_bytes(pool), most_token_layer_bytes(pool.layout)),
            wire_dtype,
            kv_secret,
            rule,
        )
        for listener in listeners:
            listener.serve(receiver)
        undo.pop_all()
    return RunningReceiver(tickets, receiver, tuple(listeners))


def _chunk_bytes(pool: KvPool) -> int:
    """Most bytes of a chunk, unless told otherwise."""
    return DEFAULT_MAX_CHUNK_BYTES if device_memory_of(pool) is None else DEVICE_MAX_CHUNK_BYTES


def _listen(
    transport: str,
    identity: WorkerIdentity,
    pool: KvPool,
    over_tcp: ListenAt,
    address: tuple[str, int, str],
    hub: LoopbackHub | None,
) -> Listener:
    match transport:
        case "shm":
            return _bound_in_folder(listen_shm)
        case "cuda_ipc":
            return _bound_in_folder(lambda: listen_cuda_ipc(device_memory_of(pool)))
        case "tcp":
            return _bound(over_tcp, *address)
        case "nixl":
            return _bound(listen_nixl, *address)
        case "loopback" if hub is not None:
            return hub.listen(identity.worker_id)
    raise ConfigError.of(
        "kv_transport", transport, "use shm, tcp, nixl or cuda_ipc, or loopback within a hub"
    )


def _bound_in_folder(listen: Callable[[], Listener]) -> Listener:
    try:
        return listen()
    except OSError as error:
        folder = tempfile.gettempdir()
        fix = f"no Unix socket there ({error}); set TMPDIR to a short path that can be written"
        raise ConfigError.of("TMPDIR", folder, f"{fix}, or give --kv-transport=tcp") from error


def _bound(listen: ListenAt, host: str, port: int, advertise_address: str) -> Listener:
    try:
        return listen(host, port, advertise_address)
    except OSError as error:
        fault = bind_fault(host, port, "kv_host", "kv_port")
        fallback = ConfigError.of("kv_host", host, f"cannot listen there ({error})")
        raise fault or fallback from error
