"""Connections over Unix sockets, on which frames and one file descriptor travel, and payloads in
slots of memory that both ends share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

from baton.v1 import kv_pb2
from kv_transfer.device_memory import Payload
from kv_transfer.frame import Frame, FrameBuffer, FrameError, encode
from kv_transfer.kv_secret import receiver_seals
from kv_transfer.receiver import Land, Receiver
from kv_transfer.ticket import Endpoint, local_host_id
from kv_transfer.transport.connection import TransportError
from kv_transfer.transport.stream import ServerStream, SlottedConnection, StreamListener

_FD = struct.Struct("@i")
_NO_PAYLOAD = memoryview(b"")
_READ_BYTES = 64 * 1024
#: Directories of sockets, in the one for temporary files: before they are locked, and then.
_FRESH_PREFIX, _PREFIX = "baton-new-", "baton-kv-"
_LOCK_NAME = "lock"


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """Connect to the Unix socket at `path`. Raises TransportError; a path left behind by a dead
    worker is one such."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        sock.settimeout(None)
    except (OSError, ValueError) as error:
        sock.close()
        raise TransportError(f"cannot connect to {path}: {error}") from error
    return sock


class _Folder:
    """A directory that only this user can enter, with a lock that its process holds for as long as
    it lives, however it ends."""

    def __init__(self) -> None:
        """Raises OSError."""
        # It gets the name that `sweep` looks for once it is locked.
        fresh = tempfile.mkdtemp(prefix=_FRESH_PREFIX)
        self._lock = os.open(f"{fresh}/{_LOCK_NAME}", os.O_CREAT | os.O_CLOEXEC | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path = Path(fresh).with_name(
                _PREFIX + Path(fresh).name.removeprefix(_FRESH_PREFIX)
            )
            os.rename(fresh, self.path)
        except OSError:
            os.close(self._lock)
            shutil.rmtree(fresh, ignore_errors=True)
            raise

    def remove(self) -> None:
        """A second time changes nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(folder: Path) -> None:
    """Remove the directories in `folder` that workers of this user left behind: those whose lock
    nobody holds."""
    for left in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(left / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


class UnixListener(StreamListener):
    """Listens in a directory of its own that only this user can enter, and removes it at close.
    Sweeps those of killed workers."""

    def __init__(
        self, transport: str, stream: Callable[[socket.socket, Receiver], ServerStream]
    ) -> None:
        """Raises OSError."""
        sweep(Path(tempfile.gettempdir()))
        self._folder = _Folder()
        path = str(self._folder.path / "kv.sock")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(path)
            sock.listen(64)
        except OSError:
            sock.close()
            self._folder.remove()
            raise
        super().__init__(sock, Endpoint(transport, path, local_host_id()), stream)

    def close(self) -> None:
        super().close()
        self._folder.remove()


class UnixConnection(SlottedConnection):
    """Owns the first file descriptor that the receiver sends."""

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        super().__init__(sock, send_timeout_s)
        #: -1: none has come.
        self.fd = -1

    def read(self, num_bytes: int) -> bytes:
        # Not socket.recv_fds: in Python 3.11 it drops the flags given to it, and would wait.
        room = socket.CMSG_SPACE(_FD.size)
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        data, ancillary, _, _ = self._sock.recvmsg(num_bytes, room, flags)
        for level, kind, fds in ancillary:
            if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                continue
            for (fd,) in _FD.iter_unpack(fds[: len(fds) - len(fds) % _FD.size]):
                if self.fd < 0:
                    self.fd = fd
                else:
                    os.close(fd)
        return data

    def close(self) -> None:
        super().close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class UnixServerStream(ServerStream):
    """The receiver's end. No payload follows a header, so one read may bring many frames."""

    def __init__(self, sock: socket.socket, receiver: Receiver) -> None:
        super().__init__(sock, receiver)
        self._buffer = FrameBuffer()
        self._frames: Iterator[Frame] = iter(())
        # Not to be read before the frame before was taken in, which may change how this is read.
        self._ahead: Frame | None = None

    @abstractmethod
    def slot(self, index: int, num_bytes: int) -> Payload | None:
        """The payload that the sender has put into a slot; None if there are no slots yet."""

    def send_with_fd(self, accept: kv_pb2.KvAccept, fd: int) -> None:
        """Send the acceptance with a copy of `fd`. Raises OSError."""
        data = encode(accept)
        if socket.send_fds(self.sock, [data], [fd]) != len(data):
            raise OSError("the acceptance could not be sent whole")

    def agree(self, version: int) -> None:
        super().agree(version)
        self._buffer.version = version

    def seal(self, key: bytes) -> None:
        seals = receiver_seals(key)
        self._seals, self._buffer.seal = seals, seals.incoming

    @property
    def has_more(self) -> bool:
        self._ahead = self._ahead or next(self._frames, None)
        return self._ahead is not None

    def read_frame(self, land: Land) -> tuple[Frame, Payload]:
        del land
        while (frame := self._ahead or next(self._frames, None)) is None:
            data = self.sock.recv(_READ_BYTES)
            if not data:
                raise EOFError
            self._frames = self._buffer.feed(data)
        self._ahead = None
        if not isinstance(frame, kv_pb2.KvChunk):
            return frame, _NO_PAYLOAD
        is_within = (
            frame.slot < self.receiver.num_credits
            and frame.payload_bytes <= self.receiver.max_chunk_bytes
        )
        found = self.slot(frame.slot, frame.payload_bytes) if is_within else None
        if found is None:
            raise FrameError(f"a chunk of {frame.payload_bytes} bytes in slot {frame.slot}")
        return frame, found
