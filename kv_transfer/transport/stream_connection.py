"""The sender's end over a stream socket, without the staging: what tcp and shm have in common."""

from __future__ import annotations

import socket
import struct
from abc import ABC, abstractmethod
from collections import deque

from baton.v1 import kv_pb2
from kv_transfer.frame import Frame, FrameBuffer, FrameError, encode
from kv_transfer.frame_seal import FrameSeal, sender_seals
from kv_transfer.transport.base import Staged, TransportError

_READ_BYTES = 64 * 1024
_MAX_HELD_BYTES = 64 * 1024


def set_socket_timeout(sock: socket.socket, option: int, timeout_s: float) -> None:
    """Bound each blocking receive (SO_RCVTIMEO) or send (SO_SNDTIMEO); 0 waits for ever."""
    seconds = int(timeout_s)
    timeval = struct.pack("@ll", seconds, round((timeout_s - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, timeval)


def send_all(sock: socket.socket, *pieces: bytes | memoryview) -> None:
    """Gather the pieces into the socket. Raises OSError, also when the socket's send timeout passes
    without progress."""
    views = [memoryview(piece) for piece in pieces if len(piece)]
    while views:
        num_sent = sock.sendmsg(views)
        while views and num_sent >= len(views[0]):
            num_sent -= len(views.pop(0))
        if views:
            views[0] = views[0][num_sent:]


class StreamConnection(ABC):
    """See Connection. Owns `sock`, which is in blocking mode."""

    #: What the receiver must say that payloads' checksums are: it follows from where payloads are.
    payload_checksum: kv_pb2.KvPayloadChecksum.ValueType = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        set_socket_timeout(sock, socket.SO_SNDTIMEO, send_timeout_s)
        self._sock = sock
        self._buffer = FrameBuffer()
        self._frames: deque[Frame] = deque()
        self._seal: FrameSeal | None = None
        # Frames without payload that go out with the next.
        self._held = b""

    @abstractmethod
    def stage(self, num_bytes: int) -> Staged | None: ...

    @abstractmethod
    def unstage(self, staged: Staged) -> None: ...

    @abstractmethod
    def open_staging(self, accept: kv_pb2.KvAccept) -> None:
        """The peer has said how much may be in flight."""

    @abstractmethod
    def take_back(self, slots: list[int]) -> None:
        """The peer gives room back. Raises FrameError if it was not taken."""

    @abstractmethod
    def payload_of(self, staged: Staged | None) -> tuple[memoryview, ...]:
        """What must follow the header on the socket."""

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        payload = self.payload_of(staged)
        num_bytes = sum(piece.nbytes for piece in payload)
        self._held += encode(frame, num_bytes, self._buffer.version, self._seal)
        if more and not payload and len(self._held) < _MAX_HELD_BYTES:
            return
        held, self._held = self._held, b""
        try:
            self.write(held, *payload)
        except BlockingIOError:
            raise TransportError("the receiver takes no bytes any more") from None
        except OSError as error:
            raise TransportError(f"the connection to the receiver is lost: {error}") from error

    def seal(self, key: bytes) -> None:
        if self._frames:
            raise FrameError("the receiver spoke before it was told who we are")
        seals = sender_seals(key)
        self._seal, self._buffer.seal = seals.outgoing, seals.incoming

    def receive(self) -> Frame | None:
        while not self._frames:
            try:
                data = self.read(_READ_BYTES)
            except BlockingIOError:
                return None
            except OSError as error:
                raise TransportError(f"the connection to the receiver is lost: {error}") from error
            if not data:
                raise TransportError("the receiver has closed the connection")
            self._frames.extend(self._buffer.feed(data))
        frame = self._frames.popleft()
        if isinstance(frame, kv_pb2.KvAccept):
            if frame.payload_checksum != self.payload_checksum:
                raise FrameError(f"payload checksums of kind {frame.payload_checksum} on this way")
            self.open_staging(frame)
        elif isinstance(frame, kv_pb2.KvCredit):
            self.take_back(list(frame.slots))
        return frame

    def read(self, num_bytes: int) -> bytes:
        """What has come, without waiting. Raises BlockingIOError if nothing has."""
        return self._sock.recv(num_bytes, socket.MSG_DONTWAIT)

    def write(self, *pieces: bytes | memoryview) -> None:
        """All of them. Raises OSError, also when the send timeout passes without progress."""
        send_all(self._sock, *pieces)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()
