"""Interface of a transport: a listener at the receiver, and connections at the sender.

Each transport is a file with its name that defines TRANSPORT. What it reaches and requires is in
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
    """The receivers of one process, by name; see LoopbackHub."""

    def listen(self, name: str) -> Listener: ...

    def has(self, name: str) -> bool: ...

    def connect(self, name: str) -> Connection: ...


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Settings of the transports of one worker; each uses a part of them.

    worker_id: name within `hub`.
    host, port: to listen on; port 0 takes a free one.
    advertise_address: host:port for senders, if it differs.
    send_timeout_s: per frame.
    tls: None for plain text.
    peer_names: a peer's certificate must carry one of them; empty for any.
    memory: of the device that holds the worker's KV, or None.
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


#: Connects to an endpoint's address; float: timeout in seconds. Raises TransportError.
Dial = Callable[[str, float], Connection]


@dataclass(frozen=True, slots=True)
class Transport:
    """The implementation of one transport.

    listen: raises OSError if it cannot bind, ConfigError if a requirement is missing.
    dialer: makes the Dial of one worker's senders; raises ConfigError.
    """

    listen: Callable[[TransportConfig], Listener]
    dialer: Callable[[TransportConfig], Dial]


def transport_named(name: str) -> Transport:
    """The implementation of a transport in baton.kv_transports, imported on first use."""
    transport: Transport = importlib.import_module(f"kv_transfer.transport.{name}").TRANSPORT
    return transport
