"""Memory of a device that processes of one host share, pools whose blocks can be copied to and from
it, and how payloads there are filled, verified and read.

kv_transfer knows no torch: a device's bytes are whatever the pool's own DeviceCopy and DeviceMemory
understand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from engine.interface import DeviceLost
from engine.kv.interface import KvPool
from engine.kv.range import KvRange
from kv_transfer.codec import ChunkCodec
from kv_transfer.wire_format import WireFormat, wire_formats


class DeviceBytes(Protocol):
    """Bytes in a device's memory."""

    @property
    def nbytes(self) -> int: ...


#: A chunk's payload, or room for one.
Payload = memoryview | DeviceBytes


class DeviceArea(Protocol):
    """A piece of a device's memory that several processes have mapped. Used by one thread at a
    time."""

    @property
    def handle(self) -> bytes:
        """By which a process of the same host opens it."""
        ...

    @property
    def address(self) -> int:
        """Of its first byte, in the device's memory."""
        ...

    def part(self, start: int, num_bytes: int) -> DeviceBytes:
        """Within the area, which must outlive it. start: a multiple of 256."""
        ...

    def close(self) -> None:
        """Free it, or, where it was opened by a handle, unmap it. All copies from and to it are
        over."""
        ...


class DeviceMemory(Protocol):
    """The memory of the device that a pool's blocks are in, or can be copied to. Thread-safe."""

    @property
    def device_number(self) -> int:
        """Of the device, as this process numbers those of its kind."""
        ...

    def allocate(self, num_bytes: int) -> DeviceArea:
        """New memory, of this area alone. Raises OSError if there is none."""
        ...

    def open(self, handle: bytes, num_bytes: int) -> DeviceArea:
        """What another process has allocated, at least so large. Raises OSError if it cannot be
        mapped here, or is smaller."""
        ...


class DeviceCopy(Protocol):
    """See engine.kv.tensors.device_copy: what a pool's device does itself. Ranges are checked; all
    raise ValueError, or RuntimeError if the device fails. When a call returns its copies are over,
    on this device and for whoever shares the memory."""

    @property
    def memory(self) -> DeviceMemory: ...

    def fits(self, piece: KvRange, wire: WireFormat) -> bool: ...

    # payload is Any, as it is whatever `memory` gives.
    def pack(
        self, block_ids: Sequence[int], piece: KvRange, wire: WireFormat, payload: Any, seed: int
    ) -> int: ...

    def unpack(
        self, block_ids: Sequence[int], piece: KvRange, wire: WireFormat, payload: Any, seed: int
    ) -> int: ...

    def put(self, data: memoryview, payload: Any, seed: int) -> int: ...

    def take(self, payload: Any, data: memoryview, seed: int) -> int: ...


@runtime_checkable
class DevicePool(Protocol):
    """A pool whose blocks may be in a device's memory."""

    @property
    def device_copy(self) -> DeviceCopy | None:
        """None if they are not, or nobody can share that memory."""
        ...


def device_copy_of(pool: KvPool) -> DeviceCopy | None:
    """What copies the pool's blocks within its device, if anything does."""
    return pool.device_copy if isinstance(pool, DevicePool) else None


def device_memory_of(pool: KvPool) -> DeviceMemory | None:
    """Where the pool's blocks can be sent and taken without passing the host; None: nowhere."""
    copy = device_copy_of(pool)
    return copy.memory if copy else None


#: Called in a transfer's thread; has the worker end.
OnDeviceLost = Callable[[DeviceLost], None]


def raise_device_lost(lost: DeviceLost) -> None:
    """Where no engine loop can end the worker: ends the connection's thread."""
    raise lost


def check_device(pool: KvPool, on_device_lost: OnDeviceLost) -> None:
    """After a copy that failed: one handoff's fault if the device still works. If it does not,
    every later one would fail as well, and `on_device_lost` is called."""
    try:
        pool.synchronize()
    except RuntimeError as error:
        on_device_lost(DeviceLost(str(error)))


def warm_up_copies(pool: KvPool) -> None:
    """Pack a block and unpack it, in each form that KV may come in from a sender whose blocks have
    the size of this pool's, or go out in: what the device compiles for it is compiled before the
    first handoff waits. A sender with blocks of another size has kernels of its own.

    Nothing where no device copies. The pool holds nothing yet: block 0 is written. Raises OSError
    if there is no memory, RuntimeError if the device fails.
    """
    copy, layout = device_copy_of(pool), pool.layout
    if copy is None:
        return
    piece = KvRange(0, layout.block_size, 0, layout.num_layers)
    for wire in wire_formats(layout):
        if copy.fits(piece, wire):
            area = copy.memory.allocate(wire.num_bytes(piece))
            try:
                payload = area.part(0, wire.num_bytes(piece))
                copy.pack((0,), piece, wire, payload, 0)
                copy.unpack((0,), piece, wire, payload, 0)
            finally:
                area.close()


class DeviceCodec:
    """Fills and reads the payloads of one connection, which are in a device's memory. Used by one
    thread at a time.

    The device packs, converts and unpacks. What it cannot, such as pieces that are not of whole
    words, is packed by the host, and copied.
    """

    def __init__(self, codec: ChunkCodec, copy: DeviceCopy) -> None:
        self._codec = codec
        self._copy = copy
        self._scratch = memoryview(b"")

    def pack(
        self, block_ids: Sequence[int], piece: KvRange, payload: DeviceBytes, seed: int
    ) -> int:
        """Fill `payload` from the blocks; its word sum. Raises ValueError, RuntimeError as
        DeviceCopy does."""
        if self._copy.fits(piece, self._codec.wire):
            return self._copy.pack(block_ids, piece, self._codec.wire, payload, seed)
        data = self._room(payload.nbytes)
        self._codec.pack(block_ids, piece, data)
        return self._copy.put(data, payload, seed)

    def unpack(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        payload: DeviceBytes,
        seed: int,
        checksum: int,
    ) -> bool:
        """Write `payload` into the blocks; False if its word sum is another: then they may hold
        what came, or what they held. Raises what pack does."""
        wire = self._codec.wire
        if self._copy.fits(piece, wire):
            return self._copy.unpack(block_ids, piece, wire, payload, seed) == checksum
        data = self._room(payload.nbytes)
        if self._copy.take(payload, data, seed) != checksum:
            return False
        self._codec.unpack(block_ids, piece, data)
        return True

    def _room(self, num_bytes: int) -> memoryview:
        """Host memory for a payload; the same each time."""
        if len(self._scratch) < num_bytes:
            self._scratch = memoryview(bytearray(num_bytes))
        return self._scratch[:num_bytes]
