"""What a transport is: a listener at the receiver, and connections at the sender.

The file of a transport has its name and a TRANSPORT; what it reaches and needs is in
baton.kv_transports.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.rpc.tls import TlsFiles
from kv_transfer.device_memory import DeviceMemory
from kv_transfer.receiver import Receiver
from kv_transfer.ticket import Endpoint
from kv_transfer.transport.connection import Connection


class Listener(Protocol):
    """A bound address that serves connections from `serve` to `close`."""

    @property
    def endpoint(self) -> Endpoint: ...

    def serve(self, receiver: Receiver) -> None: ...

    def close(self) -> None: ...


class Hub(Protocol):
    """The receivers of one process by name; see LoopbackHub."""

    def listen(self, name: str) -> Listener: ...

    def has(self, name: str) -> bool: ...

    def connect(self, name: str) -> Connection: ...


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """What the transports of one worker are given; each takes what it needs.

    worker_id: its name within `hub`. host, port: to listen on; port 0 takes a free one.
    advertise_address: the host:port that senders are given, if not that one. send_timeout_s: of one
    frame. tls: None for plain text. peer_names: of which a peer's certificate must carry one; none:
    any will do. memory: of the device that the worker's KV is on; None if that is none.
    """

    worker_id: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    advertise_address: str = ""
    send_timeout_s: float = 10.0
    tls: TlsFiles | None = None
    peer_names: tuple[str, ...] = ()
    memory: DeviceMemory | None = None
    hub: Hub | None = None


#: Connects to an endpoint's address within so many seconds. Raises TransportError.
Dial = Callable[[str, float], Connection]


@dataclass(frozen=True, slots=True)
class Transport:
    """The code of one transport.

    listen: raises OSError if it cannot bind, ConfigError if the worker lacks what it needs.
    dialer: makes what one worker's senders connect with; raises ConfigError.
    """

    listen: Callable[[TransportConfig], Listener]
    dialer: Callable[[TransportConfig], Dial]


def transport_named(name: str) -> Transport:
    """The code of a transport of baton.kv_transports, imported when it is first asked for."""
    transport: Transport = importlib.import_module(f"kv_transfer.transport.{name}").TRANSPORT
    return transport
