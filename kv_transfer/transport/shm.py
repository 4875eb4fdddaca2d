"""KV through memory that two processes of one host share: one copy in by the sender, one out by the receiver.

The receiver makes a segment per connection and passes it with KvAccept over a Unix socket; it is sealed, so neither side
can shrink it under the other. It has one slot per credit, and a slot belongs to the sender except between the sending
of a chunk and its credit.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from baton.v1 import kv_pb2
from kv_transfer.endpoint import Endpoint, TransportKind, local_host_id
from kv_transfer.frame import Frame, FrameBuffer, FrameError, Preamble, encode
from kv_transfer.frame_seal import receiver_seals
from kv_transfer.receiver import Land, Receiver
from kv_transfer.transport.base import TransportError
from kv_transfer.transport.slotted_connection import SlottedConnection
from kv_transfer.transport.stream_listener import ServerStream, StreamListener

_FD = struct.Struct("@i")
_NO_PAYLOAD = memoryview(b"")
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAX_SEGMENT_BYTES = 1 << 36
_READ_BYTES = 64 * 1024


def connect_shm(path: str, timeout_s: float, send_timeout_s: float) -> ShmConnection:
    """Connect to the Unix socket at `path`. Raises TransportError; a path left behind by a dead worker is one such."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        sock.settimeout(None)
    except (OSError, ValueError) as error:
        sock.close()
        raise TransportError(f"cannot connect to {path}: {error}") from error
    return ShmConnection(sock, send_timeout_s)


def listen_shm() -> ShmListener:
    """Bind to a Unix socket in a directory of its own that only this user can enter. Raises OSError."""
    directory = Path(tempfile.mkdtemp(prefix="baton-kv-"))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path = directory / "kv.sock"
        sock.bind(str(path))
        sock.listen(64)
    except OSError:
        sock.close()
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return ShmListener(sock, directory, str(path))


class ShmListener(StreamListener):
    """Removes its directory at close."""

    def __init__(self, sock: socket.socket, directory: Path, path: str) -> None:
        super().__init__(sock, Endpoint(TransportKind.SHM, path, local_host_id()), ShmServerStream)
        self._directory = directory

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


class _Segment:
    """A mapped segment of `num_slots` slots, page-aligned, each of at least `slot_bytes` bytes. Does not own `fd`."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int) -> None:
        self._stride = _stride(slot_bytes)
        # Every page is mapped now, so that no chunk pays for the first touch.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(fd, num_slots * self._stride, flags)
        self._view = memoryview(self._map)

    def slot(self, index: int, num_bytes: int) -> memoryview:
        """Writable; must not outlive the segment."""
        start = index * self._stride
        return self._view[start : start + num_bytes]

    def close(self) -> None:
        self._view.release()
        # A slice that someone still holds keeps the mapping alive; it goes with the slice.
        with contextlib.suppress(BufferError):
            self._map.close()


def _fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """File descriptors that came beside the data; the caller owns them."""
    return [
        fd
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _FD.iter_unpack(data[: len(data) - len(data) % _FD.size])
    ]


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class ShmConnection(SlottedConnection):
    """Packs straight into the receiver's slots."""

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        super().__init__(sock, send_timeout_s)
        self._fd = -1
        self._segment: _Segment | None = None

    @property
    def memory(self) -> _Segment | None:
        return self._segment

    def read(self, num_bytes: int) -> bytes:
        # Not socket.recv_fds: in Python 3.11 it drops the flags given to it, and would wait.
        room = socket.CMSG_SPACE(_FD.size)
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        data, ancillary, _, _ = self._sock.recvmsg(num_bytes, room, flags)
        for fd in _fds(ancillary):
            if self._fd < 0:
                self._fd = fd
            else:
                os.close(fd)
        return data

    def open_staging(self, accept: kv_pb2.KvAccept) -> None:
        if self._fd < 0 or self._segment:
            raise FrameError("the receiver's acceptance came without shared memory, or twice")
        num_bytes = accept.num_credits * _stride(accept.max_chunk_bytes)
        try:
            seals = fcntl.fcntl(self._fd, fcntl.F_GET_SEALS)
            if (
                not 0 < num_bytes <= _MAX_SEGMENT_BYTES
                or os.fstat(self._fd).st_size != num_bytes
                or seals & _SIZE_SEALS != _SIZE_SEALS
            ):
                raise TransportError(
                    "the receiver's shared memory is not as it says, or not sealed"
                )
            self._segment = _Segment(self._fd, accept.num_credits, accept.max_chunk_bytes)
        except (OSError, ValueError) as error:
            raise TransportError(f"the receiver's shared memory cannot be used: {error}") from error
        self.open_slots(accept.num_credits)

    def close(self) -> None:
        super().close()
        segment, self._segment = self._segment, None
        if segment:
            segment.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ShmServerStream(ServerStream):
    """Owns the segment of one connection."""

    def __init__(self, sock: socket.socket, receiver: Receiver) -> None:
        super().__init__(sock, receiver)
        self._segment: _Segment | None = None
        self._buffer = FrameBuffer()
        self._frames: Iterator[Frame] = iter(())
        self._ahead: Frame | None = None

    @property
    def max_payload_bytes(self) -> int:
        return 0

    def accept(self, frame: kv_pb2.KvAccept) -> None:
        fd = os.memfd_create("baton-kv", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            # Allocates all pages now, so that no chunk pays for the first touch.
            os.posix_fallocate(fd, 0, frame.num_credits * _stride(frame.max_chunk_bytes))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
            self._segment = _Segment(fd, frame.num_credits, frame.max_chunk_bytes)
            data = encode(frame)
            if socket.send_fds(self.sock, [data], [fd]) != len(data):
                raise OSError("the acceptance could not be sent whole")
        finally:
            os.close(fd)

    def agree(self, version: int) -> None:
        super().agree(version)
        self._buffer.version = version

    def seal(self, key: bytes) -> None:
        seals = receiver_seals(key)
        self._seals, self._buffer.seal = seals, seals.incoming

    @property
    def has_more(self) -> bool:
        return self._peek() is not None

    def read_frame(self, land: Land) -> tuple[Frame, memoryview]:
        del land
        # No payload follows a header here, so one read may bring many frames.
        while (frame := self._peek()) is None:
            data = self.sock.recv(_READ_BYTES)
            if not data:
                raise EOFError
            self._frames = self._buffer.feed(data)
        self._ahead = None
        return frame, self._payload(frame)

    def _peek(self) -> Frame | None:
        """The next frame. Not to be called before the one before was taken in, which may change how this is read."""
        self._ahead = self._ahead or next(self._frames, None)
        return self._ahead

    def payload(self, preamble: Preamble, frame: Frame, land: Land) -> memoryview:
        del preamble, land
        return self._payload(frame)

    def _payload(self, frame: Frame) -> memoryview:
        if not isinstance(frame, kv_pb2.KvChunk):
            return _NO_PAYLOAD
        if (
            self._segment is None
            or frame.slot >= self.receiver.num_credits
            or frame.payload_bytes > self.receiver.max_chunk_bytes
        ):
            raise FrameError(f"a chunk of {frame.payload_bytes} bytes in slot {frame.slot}")
        return self._segment.slot(frame.slot, frame.payload_bytes)

    def close(self) -> None:
        super().close()
        if self._segment:
            self._segment.close()
