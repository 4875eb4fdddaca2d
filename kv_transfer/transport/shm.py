"""KV through memory that two processes of one host share: one copy in by the sender, one out by the
receiver.

The receiver makes a segment per connection and passes it with KvAccept over a Unix socket; it is
sealed, so neither side can shrink it under the other. It has one slot per credit, and a slot
belongs to the sender except between the sending of a chunk and its credit.

To reserve and write the pages of a whole segment takes as long as many a prompt, so that the first
handoff would wait for it: one slot is reserved before the acceptance, the others one by one while
no frame comes, and a page is written first by the chunk that needs it. What a sender puts into a
slot that is not reserved yet reserves it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from collections import deque

from baton.v1 import kv_pb2
from kv_transfer.frame import FrameError
from kv_transfer.receiver import Receiver
from kv_transfer.transport.base import Dial, Transport, TransportConfig
from kv_transfer.transport.connection import Staged, TransportError
from kv_transfer.transport.unix_stream import (
    UnixConnection,
    UnixListener,
    UnixServerStream,
    connect_unix,
)

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAX_SEGMENT_BYTES = 1 << 36


class _Segment:
    """A mapped segment of page-aligned slots, each of at least `slot_bytes` bytes. Does not own
    `fd`.

    slots: writable; a part of one must not outlive the segment."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int) -> None:
        stride = _stride(slot_bytes)
        self._map = mmap.mmap(fd, num_slots * stride, mmap.MAP_SHARED)
        view = memoryview(self._map)
        self.slots = [view[at * stride : (at + 1) * stride] for at in range(num_slots)]

    def close(self) -> None:
        self.slots.clear()
        # A slice that someone still holds keeps the mapping alive; it goes with the slice.
        with contextlib.suppress(BufferError):
            self._map.close()


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class ShmConnection(UnixConnection):
    """Packs straight into the receiver's slots."""

    payload_checksums = frozenset(
        {kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED, kv_pb2.KV_PAYLOAD_CHECKSUM_XXH3}
    )

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        super().__init__(sock, send_timeout_s)
        self._segment: _Segment | None = None

    def staged(self, slot: int, num_bytes: int) -> Staged:
        if self._segment is None:
            raise TransportError("there is no shared memory")
        return Staged(slot, self._segment.slots[slot][:num_bytes])

    def open_staging(self, accept: kv_pb2.KvAccept) -> None:
        if self.fd < 0 or self._segment:
            raise FrameError("the receiver's acceptance came without shared memory, or twice")
        num_bytes = accept.num_credits * _stride(accept.max_chunk_bytes)
        try:
            seals = fcntl.fcntl(self.fd, fcntl.F_GET_SEALS)
            if (
                not 0 < num_bytes <= _MAX_SEGMENT_BYTES
                or os.fstat(self.fd).st_size != num_bytes
                or seals & _SIZE_SEALS != _SIZE_SEALS
            ):
                raise TransportError(
                    "the receiver's shared memory is not as it says, or not sealed"
                )
            self._segment = _Segment(self.fd, accept.num_credits, accept.max_chunk_bytes)
        except (OSError, ValueError) as error:
            raise TransportError(f"the receiver's shared memory cannot be used: {error}") from error
        self.open_slots(accept.num_credits)

    def close(self) -> None:
        super().close()
        segment, self._segment = self._segment, None
        if segment:
            segment.close()


class ShmServerStream(UnixServerStream):
    """Owns the segment of one connection."""

    payload_checksum = kv_pb2.KV_PAYLOAD_CHECKSUM_XXH3

    def __init__(self, sock: socket.socket, receiver: Receiver) -> None:
        super().__init__(sock, receiver)
        self._segment: _Segment | None = None
        self._fd = -1
        """Of the segment, as long as some of its slots are not reserved."""
        self._stride = 0
        self._unreserved: deque[int] = deque()

    def accept(self, frame: kv_pb2.KvAccept) -> None:
        self._stride = _stride(frame.max_chunk_bytes)
        self._fd = os.memfd_create("baton-kv", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(self._fd, frame.num_credits * self._stride)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
        self._unreserved.extend(range(frame.num_credits))
        self._reserve_one()
        self._segment = _Segment(self._fd, frame.num_credits, frame.max_chunk_bytes)
        self.send_with_fd(frame, self._fd)

    def wait(self) -> bool:
        while self._unreserved and not self.is_ready:
            self._reserve_one()
        if self._fd >= 0 and not self._unreserved:
            self._close_fd()
        return super().wait()

    def _reserve_one(self) -> None:
        """In the order in which senders take slots. Raises OSError: there is no memory."""
        at = self._unreserved.popleft() * self._stride
        os.posix_fallocate(self._fd, at, self._stride)

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def slot(self, index: int, num_bytes: int) -> memoryview | None:
        return self._segment.slots[index][:num_bytes] if self._segment else None

    def close(self) -> None:
        super().close()
        self._close_fd()
        if self._segment:
            self._segment.close()


def _listen(config: TransportConfig) -> UnixListener:
    del config
    return UnixListener("shm", ShmServerStream)


def _dialer(config: TransportConfig) -> Dial:
    def dial(path: str, timeout_s: float) -> ShmConnection:
        return ShmConnection(connect_unix(path, timeout_s), config.send_timeout_s)

    return dial


TRANSPORT = Transport(_listen, _dialer)
