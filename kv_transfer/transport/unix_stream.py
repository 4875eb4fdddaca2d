"""Connections over Unix sockets, which carry frames and one file descriptor; payloads are in slots
of shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import tempfile
import time
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
#: Name prefixes of socket directories in the temporary directory: before they are locked, and
#: afterwards.
_FRESH_PREFIX, _PREFIX = "baton-new-", "baton-kv-"
_LOCK_NAME, _SOCKET_NAME = "lock", "kv.sock"
#: Age in seconds of a directory that its worker did not come to lock.
_FRESH_S = 60.0


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """Connect to the Unix socket at `path`. Raises TransportError, also for a socket of a dead
    worker."""
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
    """A directory private to this user, with a lock held until its process ends in any way."""

    def __init__(self) -> None:
        """Raises OSError."""
        # Renamed, once locked, to the name that `sweep` looks for.
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
            _remove(Path(fresh))
            raise

    def remove(self) -> None:
        """Remove the directory. Idempotent."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def sweep(folder: Path) -> None:
    """Remove the directories in `folder` left behind by workers of this user: those without a held
    lock, empty ones, and those that were not locked within a minute."""
    for left in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = _open_lock(left)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(left)
            finally:
                os.close(lock)
    for fresh in folder.glob(f"{_FRESH_PREFIX}*"):
        with contextlib.suppress(OSError):
            state = fresh.lstat()
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > _FRESH_S:
                _remove(fresh)


def _open_lock(folder: Path) -> int:
    """Raises OSError if there is none; an empty folder is removed."""
    with _opened(folder) as fd:
        try:
            return os.open(_LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=fd)
        except FileNotFoundError:
            folder.rmdir()
            raise


def _remove(folder: Path) -> None:
    """Remove the lock after the rest, so that `sweep` knows what a process did not finish
    removing."""
    with contextlib.suppress(OSError):
        with _opened(folder) as fd:
            for name in (_SOCKET_NAME, _LOCK_NAME):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
        folder.rmdir()


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of a directory. Raises OSError for a link: in a temporary directory others could
    have one lead to files of this user."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


class UnixListener(StreamListener):
    """Listens in its own directory, which is private to this user and removed at close. Sweeps
    directories of killed workers, at close, too: not each of them is started again."""

    def __init__(
        self, transport: str, stream: Callable[[socket.socket, Receiver], ServerStream]
    ) -> None:
        """Raises OSError."""
        sweep(Path(tempfile.gettempdir()))
        self._folder = _Folder()
        path = str(self._folder.path / _SOCKET_NAME)
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
        sweep(Path(tempfile.gettempdir()))


class UnixConnection(SlottedConnection):
    """Owns the first file descriptor that the receiver sends."""

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        super().__init__(sock, send_timeout_s)
        #: -1 until one arrives.
        self.fd = -1

    def read(self, num_bytes: int) -> bytes:
        # Not socket.recv_fds, which drops its flags in Python 3.11, and would block.
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
    """The receiver's end. Headers have no payload behind them, so one read may return many
    frames."""

    def __init__(self, sock: socket.socket, receiver: Receiver) -> None:
        super().__init__(sock, receiver)
        self._buffer = FrameBuffer()
        self._frames: Iterator[Frame] = iter(())
        # Frame read ahead. It must not be decoded before the previous one is processed, which may
        # change version or seal.
        self._ahead: Frame | None = None

    @abstractmethod
    def slot(self, index: int, num_bytes: int) -> Payload | None:
        """The payload in a slot; None if there are no slots yet."""

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
