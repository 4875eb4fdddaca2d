"""A connection's shared memory: little is reserved before its first frame, and all of it once the
receiver has nothing else to do."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from baton.v1 import kv_pb2
from kv_transfer.transport.shm import ShmServerStream

NUM_SLOTS, SLOT_BYTES = 4, 1 << 20
RECEIVER: Any = SimpleNamespace(num_credits=NUM_SLOTS, max_chunk_bytes=SLOT_BYTES)


class _Undisturbed(ShmServerStream):
    """No frame comes while it reserves."""

    is_ready = False


@contextmanager
def accepted(cls: type[ShmServerStream]) -> Iterator[tuple[ShmServerStream, socket.socket, int]]:
    """A stream that has sent its acceptance, the sender's end, and the segment."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stream = cls(ours, RECEIVER)
    try:
        stream.accept(kv_pb2.KvAccept(num_credits=NUM_SLOTS, max_chunk_bytes=SLOT_BYTES))
        _, (fd,), _, _ = socket.recv_fds(theirs, 4096, 1)
        yield stream, theirs, fd
        os.close(fd)
    finally:
        stream.close()
        theirs.close()


def reserved(fd: int) -> int:
    """Bytes, of any size of page."""
    return os.fstat(fd).st_blocks * 512


def test_a_frame_that_has_come_waits_for_no_memory() -> None:
    with accepted(ShmServerStream) as (stream, theirs, fd):
        assert os.fstat(fd).st_size == NUM_SLOTS * SLOT_BYTES
        before = reserved(fd)
        assert SLOT_BYTES <= before < NUM_SLOTS * SLOT_BYTES
        theirs.send(b"x")
        assert stream.wait()
        assert reserved(fd) == before


def test_all_of_it_is_reserved_while_none_comes() -> None:
    with accepted(_Undisturbed) as (stream, _, fd):
        stream.wake()
        assert not stream.wait()
        assert reserved(fd) == NUM_SLOTS * SLOT_BYTES
