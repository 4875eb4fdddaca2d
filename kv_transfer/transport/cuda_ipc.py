"""KV from one GPU's memory to another's, or to another process's on the same GPU, without passing
the host.

Frames travel on a Unix socket. The receiver has one area of staging slots per connection in its
device's memory, and sends the driver's handle of it with KvAccept. The sender maps it and packs
straight into a slot; the header goes when that is over, so that a header says that its payload has
landed. The receiver's device unpacks, and verifies, the slot within the same pass.

Memory that somebody has mapped must not be freed. So one end of a pipe goes along with the handle,
and the sender closes it after it has unmapped the memory; should it die, the kernel does. Only then
the receiver frees: see RetiredAreas.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.v1 import kv_pb2
from kv_transfer.device_memory import DeviceArea, DeviceBytes, DeviceMemory
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

#: Slots begin at multiples of so many bytes, as the device reads best.
_GRAIN_BYTES = 4096
_MAX_AREA_BYTES = 1 << 36
#: How long a listener that closes waits for senders to unmap its memory.
_CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class _Slots:
    """An area that is cut into slots."""

    area: DeviceArea
    stride: int

    def slot(self, index: int, num_bytes: int) -> DeviceBytes:
        return self.area.part(index * self.stride, num_bytes)


class CudaIpcConnection(UnixConnection):
    """Packs straight into the receiver's slots. The file descriptor that came is held as long as
    they are mapped."""

    payload_checksums = frozenset({kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM})

    def __init__(self, sock: socket.socket, send_timeout_s: float, memory: DeviceMemory) -> None:
        super().__init__(sock, send_timeout_s)
        self._device_memory = memory
        self._slots: _Slots | None = None

    def staged(self, slot: int, num_bytes: int) -> Staged:
        if self._slots is None:
            raise TransportError("there is no device memory")
        return Staged(slot, device=self._slots.slot(slot, num_bytes))

    def open_staging(self, accept: kv_pb2.KvAccept) -> None:
        if self.fd < 0 or self._slots:
            raise FrameError("the receiver's acceptance came without device memory, or twice")
        offered = accept.device_memory
        num_bytes = accept.num_credits * offered.stride
        if offered.stride < accept.max_chunk_bytes or not 0 < num_bytes <= _MAX_AREA_BYTES:
            raise TransportError(
                f"device memory of {num_bytes} bytes for {accept.num_credits} slots"
            )
        try:
            area = self._device_memory.open(offered.handle, num_bytes)
        except OSError as error:
            raise TransportError(f"the receiver's device memory cannot be used: {error}") from error
        self._slots = _Slots(area, offered.stride)
        self.open_slots(accept.num_credits)

    def close(self) -> None:
        """Unmaps before it lets go of the file descriptor."""
        slots, self._slots = self._slots, None
        if slots:
            slots.area.close()
        super().close()


class RetiredAreas:
    """Areas of connections that have ended, each until no other process can have it mapped.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._areas: dict[int, DeviceArea] = {}

    def __len__(self) -> int:
        return len(self._areas)

    def keep(self, area: DeviceArea, fd: int) -> None:
        """Take an area in; it is freed by a call of `sweep` after the other end of the pipe `fd` is
        closed."""
        with self._lock:
            self._areas[fd] = area
        self.sweep()

    def drain(self, timeout_s: float) -> None:
        """Free all, waiting up to so long for others to let go of it. What they still have then
        stays until this process ends."""
        deadline = time.monotonic() + timeout_s
        while self._areas and (left_s := deadline - time.monotonic()) > 0:
            self.sweep(left_s)

    def sweep(self, timeout_s: float = 0.0) -> None:
        """Free what nobody else has any more, first waiting up to so long for some of it."""
        with self._lock:
            poll = select.poll()
            for fd in self._areas:
                # Nothing is ever written into the pipe: POLLHUP alone can come.
                poll.register(fd, 0)
            for fd, _ in poll.poll(timeout_s * 1000) if self._areas else ():
                self._areas.pop(fd).close()
                os.close(fd)


class CudaIpcServerStream(UnixServerStream):
    """Owns the area of one connection, until the listener keeps it."""

    payload_checksum = kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM

    def __init__(self, sock: socket.socket, receiver: Receiver, listener: CudaIpcListener) -> None:
        super().__init__(sock, receiver)
        self._listener = listener
        self._slots: _Slots | None = None
        self._fd = -1

    def accept(self, frame: kv_pb2.KvAccept) -> None:
        stride = -(-frame.max_chunk_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
        self._fd, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            area = self._listener.memory.allocate(frame.num_credits * stride)
            self._slots = _Slots(area, stride)
            frame.device_memory.handle = area.handle
            frame.device_memory.stride = stride
            self.send_with_fd(frame, theirs)
        finally:
            os.close(theirs)

    def slot(self, index: int, num_bytes: int) -> DeviceBytes | None:
        return self._slots.slot(index, num_bytes) if self._slots else None

    def close(self) -> None:
        super().close()
        slots, self._slots = self._slots, None
        fd, self._fd = self._fd, -1
        if slots:
            self._listener.retired.keep(slots.area, fd)
        elif fd >= 0:
            os.close(fd)


class CudaIpcListener(UnixListener):
    """Accepts connections, and keeps memory of those that ended."""

    def __init__(self, memory: DeviceMemory) -> None:
        """memory: in which staging areas are. Raises OSError."""
        super().__init__(
            "cuda_ipc",
            lambda sock, receiver: CudaIpcServerStream(sock, receiver, self),
        )
        self.memory = memory
        self.retired = RetiredAreas()

    def close(self) -> None:
        super().close()
        self.retired.drain(_CLOSE_TIMEOUT_S)


def _listen(config: TransportConfig) -> CudaIpcListener:
    return CudaIpcListener(_memory_of(config))


def _dialer(config: TransportConfig) -> Dial:
    memory = _memory_of(config)

    def dial(path: str, timeout_s: float) -> CudaIpcConnection:
        return CudaIpcConnection(connect_unix(path, timeout_s), config.send_timeout_s, memory)

    return dial


def _memory_of(config: TransportConfig) -> DeviceMemory:
    if config.memory is None:
        fix = "needs an engine whose KV is on a CUDA device; give --device=cuda, or another way"
        raise ConfigError.of("kv_transport", "cuda_ipc", fix)
    return config.memory


TRANSPORT = Transport(_listen, _dialer)
