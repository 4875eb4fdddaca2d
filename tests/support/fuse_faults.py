"""A file system in memory that delays, tears, fails and holds up reads and writes: a disk that is
dying. It speaks the kernel's FUSE protocol (linux/fuse.h, 7.31) on /dev/fuse by itself.

One folder of files, without names that move or go. Needs root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_IN = struct.Struct("<IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
_OUT = struct.Struct("<IiQ")  # length, -errno, unique
_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
_INIT = struct.Struct("<4I2H2I2HI7I")
_READ_WRITE = struct.Struct("<2Q2IQ2I")  # handle, offset, size, flags, owner, flags, padding
_ROOT = 1
_MAX_WRITE = 128 << 10
_MINOR = 31
_DIRECT_IO = 1
_SET_SIZE = 1 << 3

#: Opcodes of requests.
LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS = 1, 2, 3, 4, 14, 15, 16, 17
RELEASE, FSYNC, FLUSH, INIT, OPENDIR, RELEASEDIR, CREATE, INTERRUPT = 18, 20, 25, 26, 27, 29, 35, 36
BATCH_FORGET = 42


class FaultyDisk:
    """Serves one mount in a thread. The faults may be changed at any time:

    read_error, write_error: errno of all reads or writes; 0: none.
    tears: share of each write that is kept, though all of it counts as written.
    delay_s: of each read and write. goes_on: while it is not set, they wait.
    """

    def __init__(self, fd: int) -> None:
        self.read_error = self.write_error = 0
        self.tears = 1.0
        self.delay_s = 0.0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._is_over = threading.Event()
        self._fd = fd
        self._files: dict[bytes, int] = {}
        self._data: dict[int, bytearray] = {}
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            INIT: self._init,
            LOOKUP: self._lookup,
            GETATTR: lambda node, _: struct.pack("<QII", 0, 0, 0) + self._attr(node),
            SETATTR: self._setattr,
            OPEN: lambda _node, _: struct.pack("<QII", 0, _DIRECT_IO, 0),
            OPENDIR: lambda _node, _: struct.pack("<QII", 0, 0, 0),
            READ: self._read,
            WRITE: self._write,
            STATFS: lambda _node, _: struct.pack("<5Q4I6I", *[1 << 20] * 5, 4096, 255, *[0] * 8),
            CREATE: self._create,
            **dict.fromkeys((RELEASE, RELEASEDIR, FSYNC, FLUSH), lambda _node, _: b""),
        }
        self._thread = threading.Thread(target=self._serve, name="fuse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After the file system is unmounted."""
        self._is_over.set()
        self.goes_on.set()
        self._thread.join(10)
        os.close(self._fd)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._fd, _MAX_WRITE + 8192)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return  # it is unmounted
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            try:
                answer = self._answers.get(opcode, _unknown)(node, request[_IN.size :])
                head = _OUT.pack(_OUT.size + len(answer), 0, unique)
            except OSError as error:
                answer, head = b"", _OUT.pack(_OUT.size, -(error.errno or errno.EIO), unique)
            try:
                os.write(self._fd, head + answer)
            except FileNotFoundError:
                continue  # nobody waits for it any more

    def _init(self, _node: int, body: bytes) -> bytes:
        major, _, readahead, _ = struct.unpack_from("<4I", body)
        return _INIT.pack(major, _MINOR, readahead, 0, 12, 9, _MAX_WRITE, 1, *[0] * 10)

    def _attr(self, node: int) -> bytes:
        is_root = node == _ROOT
        mode = stat.S_IFDIR | 0o700 if is_root else stat.S_IFREG | 0o600
        size = 0 if is_root else len(self._data[node])
        return _ATTR.pack(node, size, -(-size // 512), *[0] * 6, mode, 1, *[0] * 3, 4096, 0)

    def _entry(self, node: int) -> bytes:
        return _ENTRY.pack(node, 0, 0, 0, 0, 0) + self._attr(node)

    def _lookup(self, _node: int, body: bytes) -> bytes:
        node = self._files.get(body.rstrip(b"\0"))
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file")
        return self._entry(node)

    def _create(self, _node: int, body: bytes) -> bytes:
        node = self._files[body[16:].rstrip(b"\0")] = len(self._files) + _ROOT + 1
        self._data[node] = bytearray()
        return self._entry(node) + struct.pack("<QII", 0, _DIRECT_IO, 0)

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & _SET_SIZE:
            data = self._data[node]
            del data[size:]
            data.extend(bytes(size - len(data)))
        return struct.pack("<QII", 0, 0, 0) + self._attr(node)

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, size, *_ = _READ_WRITE.unpack_from(body)
        self._fail(self.read_error)
        return bytes(self._data[node][offset : offset + size])

    def _write(self, node: int, body: bytes) -> bytes:
        _, offset, size, *_ = _READ_WRITE.unpack_from(body)
        self._fail(self.write_error)
        data, kept = self._data[node], int(size * self.tears)
        data.extend(bytes(max(0, offset + size - len(data))))
        data[offset : offset + kept] = body[_READ_WRITE.size :][:kept]
        return struct.pack("<II", size, 0)

    def _fail(self, number: int) -> None:
        self.goes_on.wait()
        self._is_over.wait(self.delay_s)
        if number:
            raise OSError(number, os.strerror(number))


def _unknown(_node: int, _body: bytes) -> bytes:
    raise OSError(errno.ENOSYS, "not implemented")


@contextmanager
def faulty_disk(path: Path) -> Iterator[FaultyDisk]:
    """Mount one at an empty folder. Skips where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        pytest.skip("FUSE is not available here")
    options = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}".encode()
    if libc.mount(b"baton-test", bytes(path), b"fuse", 0, options):
        os.close(fd)
        pytest.skip(f"a file system cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    disk = FaultyDisk(fd)
    try:
        yield disk
    finally:
        disk.goes_on.set()
        libc.umount2(bytes(path), 2)  # MNT_DETACH: files may still be open
        disk.close()
