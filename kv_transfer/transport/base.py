"""Interface of a transport: a listener at the receiver; at the sender, connections that carry
frames both ways and provide room for payloads.

Each transport is a file with its name that defines TRANSPORT. What it reaches and requires is in
baton.kv_transports.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.errors import HandoffFailed
from baton.rpc.tls import TlsFiles
from kv_transfer.device_memory import DeviceBytes, DeviceMemory
from kv_transfer.frame import Frame
from kv_transfer.ticket import Endpoint

if TYPE_CHECKING:
    from kv_transfer.receiver import Receiver
    from kv_transfer.transport.loopback import LoopbackHub


class TransportError(HandoffFailed):
    """A connection cannot be opened, or has failed."""


_NO_BYTES = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Staged:
    """Room for one payload, in `buffer` or `device`, of the requested size; `slot` is written into
    the chunk's header.

    device: room in device memory; see DeviceCodec.
    can_gather: `pieces` may replace the buffer; they are read, and not kept, during the send.
    """

    slot: int
    buffer: memoryview = _NO_BYTES
    device: DeviceBytes | None = None
    can_gather: bool = False
    pieces: tuple[memoryview, ...] = ()

    @property
    def payload(self) -> tuple[memoryview, ...]:
        """The payload's bytes, in order."""
        return self.pieces or (self.buffer,)


class Connection(Protocol):
    """The sender's end. Used by one thread at a time. The transport does the flow control: a credit
    is room in `stage`.

    All methods except close raise TransportError when the connection is lost, and FrameError for
    invalid frames.
    """

    def stage(self, num_bytes: int) -> Staged | None:
        """Reserve room for a payload of `num_bytes` until the receiver returns it. None if there is
        none now."""
        ...

    def unstage(self, staged: Staged) -> None:
        """Return unused room."""
        ...

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        """Send a frame, with the payload in `staged`. Waits at most the send timeout.

        more: another frame, or `flush`, follows at once; this frame may be held back for it, so
        that one write wakes the receiver once. The payload must not change until then.
        """
        ...

    def flush(self) -> None:
        """Send held-back frames."""
        ...

    def seal(self, key: bytes) -> None:
        """From here on frames carry digests under this key, in both directions; see FrameSeal.
        Raises FrameError if unsealed frames have arrived already."""
        ...

    def receive(self) -> Frame | None:
        """Return the next frame that has arrived, or None. Never waits."""
        ...

    def fileno(self) -> int:
        """File descriptor to poll for frames; -1 if they arrive only during calls of this end."""
        ...

    def close(self) -> None: ...


#: Connects to the best of the endpoints; float: timeout in seconds. Raises TransportError.
Connector = Callable[[Sequence[Endpoint], float], Connection]


class Listener(Protocol):
    """A bound address that serves connections from `serve` to `close`."""

    @property
    def endpoint(self) -> Endpoint: ...

    def serve(self, receiver: Receiver) -> None: ...

    def close(self) -> None: ...


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
    hub: LoopbackHub | None = None


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
