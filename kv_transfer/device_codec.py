"""A chunk's payload in a device's memory: how it is written there, and how it is verified and
read."""

from __future__ import annotations

from collections.abc import Sequence

from baton.types import KvRange
from kv_transfer.codec import ChunkCodec
from kv_transfer.device_memory import DeviceBytes, DeviceCopy


class DeviceCodec:
    """Fills and reads the payloads of one connection, which are in a device's memory. Used by one
    thread at a time.

    The device packs and unpacks in one pass, with the checksum. KV that it cannot (of another type
    than the wire's, or in pieces that are not of whole words) is packed by the host, and copied.
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
        if self._is_direct(piece):
            run_tokens = self._codec.wire.block_size
            return self._copy.pack(block_ids, piece, run_tokens, payload, seed)
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
        if self._is_direct(piece):
            run_tokens = self._codec.wire.block_size
            return self._copy.unpack(block_ids, piece, run_tokens, payload, seed) == checksum
        data = self._room(payload.nbytes)
        if self._copy.take(payload, data, seed) != checksum:
            return False
        self._codec.unpack(block_ids, piece, data)
        return True

    def _is_direct(self, piece: KvRange) -> bool:
        return self._codec.is_plain and self._copy.fits(piece, self._codec.wire.block_size)

    def _room(self, num_bytes: int) -> memoryview:
        """Host memory for a payload; the same each time."""
        if len(self._scratch) < num_bytes:
            self._scratch = memoryview(bytearray(num_bytes))
        return self._scratch[:num_bytes]
