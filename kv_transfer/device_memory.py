"""Device memory shared between processes of one host: interfaces of pools that copy blocks to and
from it, and the codec of payloads in it.

kv_transfer does not import torch: only the pool's own DeviceCopy and DeviceMemory interpret device
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Protocol, runtime_checkable

from engine.interface import DeviceLost
from engine.kv.interface import KvPool, kept_parts, shared_slots
from engine.kv.range import KvRange
from kv_transfer.codec import ChunkCodec
from kv_transfer.wire_format import WireFormat, wire_formats


class DeviceBytes(Protocol):
    """Bytes in a device's memory."""

    @property
    def nbytes(self) -> int: ...


#: A chunk's payload, or the room for one.
Payload = memoryview | DeviceBytes


class DeviceArea(Protocol):
    """A range of device memory that several processes can map. Used by one thread at a time."""

    @property
    def handle(self) -> bytes:
        """Handle with which a process of the same host opens it."""
        ...

    @property
    def address(self) -> int:
        """Device address of its first byte."""
        ...

    def part(self, start: int, num_bytes: int) -> DeviceBytes:
        """A part of the area, which must outlive it. start: a multiple of 256."""
        ...

    def close(self) -> None:
        """Free an allocated area, or unmap an opened one. All copies must have ended."""
        ...


class DeviceMemory(Protocol):
    """Memory of the device that holds a pool's blocks, or can copy them. Thread-safe."""

    @property
    def device_number(self) -> int:
        """The device's number in this process."""
        ...

    def allocate(self, num_bytes: int) -> DeviceArea:
        """Allocate an area. Raises OSError if there is no memory."""
        ...

    def open(self, handle: bytes, num_bytes: int) -> DeviceArea:
        """Map an area of another process. Raises OSError if it cannot be mapped, or is smaller than
        `num_bytes`."""
        ...


class DeviceCopy(Protocol):
    """Copies by a pool's device; see engine.kv.tensors.device_copy. All methods raise ValueError
    for a bad range, RuntimeError if the device fails. Copies have completed on return, for every
    process that shares the memory."""

    @property
    def memory(self) -> DeviceMemory: ...

    def fits(self, piece: KvRange, wire: WireFormat) -> bool: ...

    # Any, because the type of `payload` depends on `memory`.
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
    """A pool with blocks in device memory."""

    @property
    def device_copy(self) -> DeviceCopy | None:
        """None if its memory cannot be shared."""
        ...


def device_copy_of(pool: KvPool) -> DeviceCopy | None:
    """The pool's device copy; None if it has none."""
    return pool.device_copy if isinstance(pool, DevicePool) else None


def device_memory_of(pool: KvPool) -> DeviceMemory | None:
    """Memory in which the pool's blocks are sent and received without the host; None if there is
    none."""
    copy = device_copy_of(pool)
    return copy.memory if copy else None


#: Called in a transfer's thread; makes the worker end.
OnDeviceLost = Callable[[DeviceLost], None]


def raise_device_lost(lost: DeviceLost) -> None:
    """Raises DeviceLost in the connection's thread, for uses without an engine loop."""
    raise lost


def check_device(pool: KvPool, on_device_lost: OnDeviceLost) -> None:
    """Check the device after a failed copy. If it still works, the failure concerns one handoff;
    otherwise `on_device_lost` is called, because all later copies would fail, too."""
    try:
        pool.synchronize()
    except RuntimeError as error:
        on_device_lost(DeviceLost(str(error)))


def warm_up_copies(pool: KvPool) -> None:
    """Compile the device's kernels before the first handoff: packs and unpacks a block in each wire
    format that a sender with blocks of the same size may agree on. Other block sizes compile on
    first use.

    No-op without a device copy. Overwrites block 0; the pool must be empty. Raises OSError without
    memory, RuntimeError if the device fails.
    """
    copy, layout = device_copy_of(pool), pool.layout
    if copy is None:
        return
    whole = KvRange(0, layout.block_size, 0, layout.num_layers)
    with shared_slots(pool):
        for piece, wire in product(kept_parts(pool, whole, 0), wire_formats(layout)):
            if copy.fits(piece, wire):
                area = copy.memory.allocate(wire.num_bytes(piece))
                try:
                    payload = area.part(0, wire.num_bytes(piece))
                    copy.pack((0,), piece, wire, payload, 0)
                    copy.unpack((0,), piece, wire, payload, 0)
                finally:
                    area.close()


class DeviceCodec:
    """Packs and unpacks the payloads of one connection in device memory. Used by one thread at a
    time.

    The device packs, converts and unpacks. Pieces that it does not support, for instance those not
    of whole words, are packed by the host and copied.
    """

    def __init__(self, codec: ChunkCodec, copy: DeviceCopy) -> None:
        self._codec = codec
        self._copy = copy
        self._scratch = memoryview(b"")

    def pack(
        self, block_ids: Sequence[int], piece: KvRange, payload: DeviceBytes, seed: int
    ) -> int:
        """Pack the blocks into `payload` and return its word sum. Raises ValueError, RuntimeError
        as DeviceCopy does."""
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
        """Unpack `payload` into the blocks, and return whether its word sum equals `checksum`. If
        not, the blocks hold old or new bytes. Raises what pack does."""
        wire = self._codec.wire
        if self._copy.fits(piece, wire):
            return self._copy.unpack(block_ids, piece, wire, payload, seed) == checksum
        data = self._room(payload.nbytes)
        if self._copy.take(payload, data, seed) != checksum:
            return False
        self._codec.unpack(block_ids, piece, data)
        return True

    def _room(self, num_bytes: int) -> memoryview:
        """Host memory for a payload, reused."""
        if len(self._scratch) < num_bytes:
            self._scratch = memoryview(bytearray(num_bytes))
        return self._scratch[:num_bytes]
