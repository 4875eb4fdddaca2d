"""The sender's end over a stream socket, without the staging: what tcp and shm have in common."""

from __future__ import annotations

import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from typing import Protocol

from baton.v1 import kv_pb2
from kv_transfer.frame import Frame, FrameBuffer, FrameError, encode
from kv_transfer.kv_secret import FrameSeal, sender_seals
from kv_transfer.transport.base import Staged, TransportError

_READ_BYTES = 64 * 1024


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

    #: What the receiver may say that payloads' checksums are: it follows from where payloads are.
    payload_checksums = frozenset({kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED})

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        set_socket_timeout(sock, socket.SO_SNDTIMEO, send_timeout_s)
        self._sock = sock
        self._buffer = FrameBuffer()
        self._frames: deque[Frame] = deque()
        self._seal: FrameSeal | None = None
        # What goes out with the next frame.
        self._held: list[bytes | memoryview] = []

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
        self._held += (encode(frame, num_bytes, self._buffer.version, self._seal), *payload)
        if not more:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        held, self._held = self._held, []
        try:
            self.write(*held)
        except BlockingIOError:
            raise TransportError("the receiver takes no bytes any more") from None
        except OSError as error:
            raise TransportError(f"the connection to the receiver is lost: {error}") from error

    def seal(self, key: bytes) -> None:
        if self._frames:
            raise FrameError("the receiver spoke before it knew who we are")
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
            if frame.payload_checksum not in self.payload_checksums:
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


class SlotMemory(Protocol):
    """Memory that is cut into slots."""

    def staged(self, index: int, num_bytes: int) -> Staged:
        """The first bytes of a slot, writable."""
        ...


class SlottedConnection(StreamConnection):
    """A slot is the sender's but between the sending of a chunk and its credit. Payloads do not
    travel on the socket."""

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        super().__init__(sock, send_timeout_s)
        self._free: list[int] = []
        self._in_flight: set[int] = set()

    @property
    @abstractmethod
    def memory(self) -> SlotMemory | None:
        """The slots' memory; None before the receiver's acceptance and after the end."""

    def open_slots(self, num_slots: int) -> None:
        """The memory is there, and all its slots are free."""
        self._free = list(range(num_slots))

    def stage(self, num_bytes: int) -> Staged | None:
        memory = self.memory
        if not self._free or memory is None:
            return None
        slot = self._free.pop()
        self._in_flight.add(slot)
        return memory.staged(slot, num_bytes)

    def unstage(self, staged: Staged) -> None:
        self.take_back([staged.slot])

    def take_back(self, slots: list[int]) -> None:
        for slot in slots:
            if slot not in self._in_flight:
                raise FrameError(f"the receiver gives back slot {slot}, which is not in use")
            self._in_flight.remove(slot)
            self._free.append(slot)

    def payload_of(self, staged: Staged | None) -> tuple[memoryview, ...]:
        del staged
        return ()
