"""KV over nixl (UCX: RDMA, NVLink, or TCP where there is nothing better): the sender writes into
the receiver's staging area.

Frames travel on a TCP connection. A chunk's header goes first, then the sender writes the payload
into the slot that the header names, then KvLanded says so. The receiver drives its own side of the
library only between header and KvLanded: an idle worker polls nothing.

A staging area is in memory of the GPU that the pool is on, if both workers' are on one: then a
payload passes no host, and its sum is made and verified by the GPUs (word sums, see KvAccept). Else
both ends stage in host memory.

A staging area belongs to one connection. Nothing recalls a write that is under way when a
connection ends, and some ways of UCX write into a process by address alone: so the area is kept,
and used by nobody, for QUARANTINE_S after that. The library knows no authentication: who has an
area's description, which travels in KvAccept, may write into that area, and into no other.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import mmap
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from baton.errors import ConfigError
from baton.kv_transports import kv_transport
from baton.v1 import kv_pb2
from kv_transfer.device_memory import DeviceArea, DeviceMemory, Payload
from kv_transfer.frame import Frame, FrameError
from kv_transfer.receiver import Land, Receiver
from kv_transfer.ticket import Endpoint
from kv_transfer.transport.base import Dial, Transport, TransportConfig
from kv_transfer.transport.connection import Staged, TransportError
from kv_transfer.transport.stream import ServerStream, SlottedConnection, StreamListener
from kv_transfer.transport.tcp_stream import bind, connected, tune

#: Longer than any sender waits for a write of its own.
QUARANTINE_S = 60.0
#: How long a payload may take after its header.
_LANDING_TIMEOUT_S = 10.0
#: Polling without a pause at first, then with pauses of a millisecond.
_SPIN_S = 0.002
_NO_PAYLOAD = memoryview(b"")


def _api() -> Any:
    """The library, loaded by the first call: that takes a second. Raises ConfigError."""
    spec = kv_transport("nixl")
    if not spec.is_installed:
        fix = f"the nixl library is not installed: {spec.install}"
        raise ConfigError.of("kv_transport", spec.name, fix)
    api = importlib.import_module("nixl._api")
    # It speaks on stdout by a handler of its own; what it warns of goes where our log goes.
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
    return api


class _Area:
    """Slots of registered memory, and the agent that owns their registration. Used by one
    thread.

    kind: of memory, as the library names it; device: whose it is.
    """

    def __init__(
        self, name: str, num_slots: int, slot_bytes: int, memory: DeviceMemory | None
    ) -> None:
        """name: unlike any other agent's that a peer may ever know. memory: of the device to stage
        on; None: the host's. Raises OSError if the device has none."""
        api = _api()
        self.errors: tuple[type[Exception], ...] = tuple(
            value for key, value in vars(api.nixlBind).items() if key.endswith("Error")
        )
        self.stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = num_slots * self.stride
        self._memory: mmap.mmap | DeviceArea
        if memory is None:
            self.kind, self.device = "DRAM", 0
            self._memory = mmap.mmap(
                -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            )
            self.address: int = np.frombuffer(self._memory, np.uint8).ctypes.data
        else:
            self.kind, self.device = "VRAM", memory.device_number
            self._memory = memory.allocate(num_bytes)
            self.address = self._memory.address
        # Its own thread would spin on a core for ever.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.agent = api.nixl_agent(name, config)
        self._registration = self.agent.register_memory(
            [(self.address, num_bytes, self.device, "")], self.kind
        )

    def slot(self, index: int, num_bytes: int) -> Payload:
        start = index * self.stride
        if isinstance(self._memory, mmap.mmap):
            return memoryview(self._memory)[start : start + num_bytes]
        return self._memory.part(start, num_bytes)

    def progress(self) -> None:
        """Let the library do what is due on this side."""
        self.agent.get_new_notifs()

    def retire(self) -> mmap.mmap | DeviceArea:
        """Withdraw the registration; the memory, to be kept as long as somebody may reach into
        it."""
        with contextlib.suppress(*self.errors):
            self.agent.deregister_memory(self._registration)
        del self.agent
        return self._memory


class Quarantine:
    """Keeps memory of connections that ended, until nobody can read from it or write into it any
    more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: deque[tuple[float, mmap.mmap | DeviceArea]] = deque()

    def keep(self, memory: mmap.mmap | DeviceArea) -> None:
        """Take memory in, and let that go whose time is over."""
        now = self._clock()
        with self._lock:
            self._kept.append((now + QUARANTINE_S, memory))
            while self._kept[0][0] <= now:
                _, old = self._kept.popleft()
                # The host's is freed when its last view goes.
                if not isinstance(old, mmap.mmap):
                    old.close()


class NixlConnection(SlottedConnection):
    """Packs into registered memory of its own, one slot for each of the receiver's, and writes from
    there."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        send_timeout_s: float,
        quarantine: Quarantine,
        memory: DeviceMemory | None = None,
    ) -> None:
        """memory: of the device that the pool is on; None: none."""
        super().__init__(sock, send_timeout_s)
        if memory is not None:
            self.payload_checksums |= {kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM}
        self._device_memory = memory
        self._name = name
        self._quarantine = quarantine
        self._send_timeout_s = send_timeout_s
        self._area: _Area | None = None
        """Made for the first payload: the receiver waits a second for our answer to its acceptance,
        and an agent may take longer."""
        self._accept: kv_pb2.KvAccept | None = None
        self._remote = kv_pb2.KvRemoteMemory()
        self._peer: Any = None

    def staged(self, slot: int, num_bytes: int) -> Staged:
        if self._accept is None:
            raise TransportError("there is no memory to write to")
        area = self._area or self._open_area(self._accept)
        room = area.slot(slot, num_bytes)
        return Staged(slot, room) if isinstance(room, memoryview) else Staged(slot, device=room)

    def open_staging(self, accept: kv_pb2.KvAccept) -> None:
        if self._accept or not accept.remote_memory.agent:
            raise FrameError("the receiver's acceptance came without memory to write to, or twice")
        self._accept = accept
        self._remote = accept.remote_memory
        self.open_slots(accept.num_credits)

    def _open_area(self, accept: kv_pb2.KvAccept) -> _Area:
        is_on_device = accept.payload_checksum == kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM
        try:
            self._area = area = _Area(
                self._name,
                accept.num_credits,
                accept.max_chunk_bytes,
                self._device_memory if is_on_device else None,
            )
        except OSError as error:
            raise TransportError(f"no device memory to stage in: {error}") from error
        try:
            self._peer = area.agent.add_remote_agent(self._remote.agent)
        except area.errors as error:
            raise TransportError(f"the receiver's memory cannot be used: {error}") from error
        return area

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        if staged is None or self._area is None:
            super().send(frame, more=more)
            return
        # At once: the receiver drives its side only when it has the header.
        super().send(frame, staged)
        self._write(self._area, staged)
        super().send(kv_pb2.KvLanded(slot=staged.slot), more=more)

    def _write(self, area: _Area, staged: Staged) -> None:
        """Returns when the payload is in the receiver's slot. Raises TransportError, also after the
        send timeout: a frozen peer is never reported."""
        room = staged.buffer if staged.device is None else staged.device
        agent, num_bytes = area.agent, room.nbytes
        start, target = area.address + staged.slot * area.stride, self._remote.address
        target += staged.slot * self._remote.stride
        deadline = time.monotonic() + self._send_timeout_s
        try:
            handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs([(start, num_bytes, area.device)], area.kind),
                # Both ends stage alike.
                agent.get_xfer_descs([(target, num_bytes, self._remote.device)], area.kind),
                self._peer,
            )
            state = agent.transfer(handle)
            while state == "PROC" and not self._is_lost(deadline):
                state = agent.check_xfer_state(handle)
            if state == "DONE":
                agent.release_xfer_handle(handle)
                return
        except area.errors as error:
            raise TransportError(f"the write to the receiver has failed: {error}") from error
        raise TransportError(f"the write to the receiver has not ended ({state})")

    def _is_lost(self, deadline: float) -> bool:
        """Whether it is too late, or the receiver has hung up. Pauses, but not at first."""
        left_s = deadline - time.monotonic()
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        is_new = left_s > self._send_timeout_s - _SPIN_S
        return left_s <= 0 or bool(poll.poll(0 if is_new else 1))

    def close(self) -> None:
        super().close()
        self._accept = None
        area, self._area = self._area, None
        if area:
            self._quarantine.keep(area.retire())


class NixlServerStream(ServerStream):
    """Owns the staging area of one connection, until the listener keeps it in quarantine."""

    def __init__(self, sock: socket.socket, receiver: Receiver, listener: NixlListener) -> None:
        super().__init__(sock, receiver)
        self._listener = listener
        self._area: _Area | None = None
        if listener.memory is not None:
            self.payload_checksum = kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM

    def greet(self) -> None:
        super().greet()
        tune(self.sock)

    def accept(self, frame: kv_pb2.KvAccept) -> None:
        is_on_device = frame.payload_checksum == kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM
        self._area = area = _Area(
            self._listener.next_name(frame),
            frame.num_credits,
            frame.max_chunk_bytes,
            self._listener.memory if is_on_device else None,
        )
        frame.remote_memory.agent = area.agent.get_agent_metadata()
        frame.remote_memory.address = area.address
        frame.remote_memory.stride = area.stride
        frame.remote_memory.device = area.device
        super().accept(frame)

    def read_frame(self, land: Land) -> tuple[Frame, Payload]:
        del land
        _, frame = self.read_header(0)
        if not isinstance(frame, kv_pb2.KvChunk):
            return frame, _NO_PAYLOAD
        area = self._area
        if (
            area is None
            or frame.slot >= self.receiver.num_credits
            or frame.payload_bytes > self.receiver.max_chunk_bytes
        ):
            raise FrameError(f"a chunk of {frame.payload_bytes} bytes in slot {frame.slot}")
        self._await_landing(area, frame.slot)
        return frame, area.slot(frame.slot, frame.payload_bytes)

    def _await_landing(self, area: _Area, slot: int) -> None:
        """Drive this side of the library until the sender says that it is done."""
        begin = time.monotonic()
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        while (waited_s := time.monotonic() - begin) < _LANDING_TIMEOUT_S:
            area.progress()
            if poll.poll(0 if waited_s < _SPIN_S else 1):
                _, landed = self.read_header(0)
                if landed != kv_pb2.KvLanded(slot=slot):
                    raise FrameError(f"a {type(landed).__name__} where slot {slot} was to land")
                return
        raise FrameError(f"slot {slot} has not landed within {_LANDING_TIMEOUT_S:g} s")

    def close(self) -> None:
        super().close()
        area, self._area = self._area, None
        if area:
            self._listener.quarantine.keep(area.retire())


class NixlListener(StreamListener):
    """Accepts connections, and names their agents."""

    def __init__(self, sock: socket.socket, address: str, memory: DeviceMemory | None) -> None:
        """memory: of the device that the pool is on; None: none."""
        super().__init__(
            sock,
            Endpoint("nixl", address),
            lambda taken, receiver: NixlServerStream(taken, receiver, self),
        )
        self.memory = memory
        self.quarantine = Quarantine()
        self._numbers = itertools.count(1)

    def next_name(self, accept: kv_pb2.KvAccept) -> str:
        """Of a new agent: unlike those of all boots and connections."""
        return f"{accept.worker_id}/{accept.generation}/{next(self._numbers)}"


def _listen(config: TransportConfig) -> NixlListener:
    _api()
    return NixlListener(*bind(config), config.memory)


def _dialer(config: TransportConfig) -> Dial:
    quarantine = Quarantine()

    def dial(address: str, timeout_s: float) -> NixlConnection:
        # Not once the receiver has accepted: it waits a second for our answer.
        _api()
        # No other agent that a receiver may ever know has this name.
        name = f"sender/{secrets.token_hex(16)}"
        return NixlConnection(
            connected(address, timeout_s), name, config.send_timeout_s, quarantine, config.memory
        )

    return dial


TRANSPORT = Transport(_listen, _dialer)
