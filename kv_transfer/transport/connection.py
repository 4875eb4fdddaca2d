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
