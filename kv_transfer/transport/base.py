"""What a transport is: a listener at the receiver, and at the sender connections with room for
payloads, and frames both ways.

The file of a transport has its name and a TRANSPORT; what it reaches and needs is in
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
    """A connection cannot be made, or cannot go on."""


_NO_BYTES = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Staged:
    """Room for one payload: `buffer`, or `device`, has the size asked for; `slot` goes into the
    chunk's header.

    device: the room, where it is in a device's memory; see DeviceCodec.
    can_gather: `pieces` may take the place of the buffer; they are read, and not kept, while it is
    sent.
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
    """The sender's end. Used by one thread at a time. A transport does the flow control: credits
    are room in `stage`.

    All methods but close raise TransportError when the connection is lost, FrameError when what
    came is no frame.
    """

    def stage(self, num_bytes: int) -> Staged | None:
        """Room for a payload of `num_bytes`, held until the receiver gives it back. None: none
        now."""
        ...

    def unstage(self, staged: Staged) -> None:
        """Take back room that nothing was sent with."""
        ...

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        """Send a frame, with the payload that was put into `staged`. Waits no longer than the send
        timeout.

        more: another frame or `flush` follows at once; this one may wait for it, so that one write
        wakes the receiver once. Until then the payload must stay as it is.
        """
        ...

    def flush(self) -> None:
        """Send what waits for more."""
        ...

    def seal(self, key: bytes) -> None:
        """From here on frames carry digests under this key, both ways: see FrameSeal. Raises
        FrameError if some without have come already."""
        ...

    def receive(self) -> Frame | None:
        """The next frame that has come, without waiting; None if there is none."""
        ...

    def fileno(self) -> int:
        """What to wait on for frames to come; -1 if they come only while this end calls."""
        ...

    def close(self) -> None: ...


#: Makes a connection to the best of the endpoints within so many seconds. Raises TransportError.
Connector = Callable[[Sequence[Endpoint], float], Connection]


class Listener(Protocol):
    """A bound address that serves connections from `serve` to `close`."""

    @property
    def endpoint(self) -> Endpoint: ...

    def serve(self, receiver: Receiver) -> None: ...

    def close(self) -> None: ...


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
    hub: LoopbackHub | None = None


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
