"""The sender's end of a transport: connections with room for payloads, and frames both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.errors import HandoffFailed
from kv_transfer.device_memory import DeviceBytes
from kv_transfer.frame import Frame
from kv_transfer.ticket import Endpoint


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
