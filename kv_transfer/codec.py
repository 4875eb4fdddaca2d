"""A chunk's bytes: how they are read from, and written to, the blocks of a pool.

A payload is runs: of each of the sender's blocks that the chunk's tokens lie in, those tokens; see WireFormat. So a sender
copies each block in one piece, and so does a receiver whose blocks have the same size; others take the runs apart. Where a peer
keeps KV in another type than the wire's, it turns each run while that is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.engine.interface import KvPool
from baton.types import KvLayout
from kv_transfer.chunking import runs
from kv_transfer.coverage import KvRange
from kv_transfer.transcoder import Transcoder
from kv_transfer.wire_format import WireFormat

#: Shorter pieces are packed together: gathering costs about as much for each piece as copying this many bytes.
MIN_LENT_BYTES = 32 * 1024


@runtime_checkable
class LendingPool(Protocol):
    """A pool whose blocks can be read where they lie, if that is in host memory."""

    def lend(self, block_id: int, first_layer: int, num_layers: int) -> memoryview | None:
        """The bytes of a whole block's layers, to be read only; None off the host. Raises ValueError for a wrong range."""
        ...


class ChunkCodec:
    """Fills and reads the payloads of one connection. Used by one thread at a time."""

    def __init__(self, pool: KvPool, wire: WireFormat) -> None:
        """Raises ValueError if KV cannot be turned from the pool's dtype into the wire's, or back."""
        layout = pool.layout
        self.wire = wire
        self._pool = pool
        self._block_size = layout.block_size
        # KV of the wire's own type goes straight between blocks and payload.
        is_plain = wire.is_that_of(layout.dtype)
        self._transcoder = None if is_plain else Transcoder(layout.dtype, wire)
        self._token_layer_bytes = layout.token_layer_bytes
        self._scratch = memoryview(b"")

    @property
    def is_plain(self) -> bool:
        """Whether payloads hold the pool's bytes as they are."""
        return self._transcoder is None

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        """Fill `out` with a payload from the blocks. Raises what KvPool.pack does; ValueError for another size."""
        layers = piece.first_layer, piece.num_layers
        for run in self._runs(block_ids, piece, out):
            if self._transcoder is None:
                self._pool.pack(run.block_ids, run.first_token, run.num_tokens, *layers, run.data)
            else:
                bits = self._room(run.num_tokens, piece.num_layers)
                self._pool.pack(run.block_ids, run.first_token, run.num_tokens, *layers, bits)
                self._transcoder.encode(bits, run.num_tokens, piece.num_layers, run.data)

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        """Write a payload into the blocks. Raises what KvPool.unpack does; ValueError for another size."""
        layers = piece.first_layer, piece.num_layers
        for run in self._runs(block_ids, piece, data):
            bits = run.data
            if self._transcoder is not None:
                bits = self._room(run.num_tokens, piece.num_layers)
                self._transcoder.decode(run.data, run.num_tokens, piece.num_layers, bits)
            self._pool.unpack(run.block_ids, run.first_token, run.num_tokens, *layers, bits)

    def _room(self, num_tokens: int, num_layers: int) -> memoryview:
        """Memory for a run of the pool's elements; the same each time."""
        num_bytes = num_tokens * num_layers * self._token_layer_bytes
        if len(self._scratch) < num_bytes:
            self._scratch = memoryview(bytearray(num_bytes))
        return self._scratch[:num_bytes]

    def _runs(
        self, block_ids: Sequence[int], piece: KvRange, payload: memoryview
    ) -> Iterator[_Run]:
        if payload.nbytes != self.wire.num_bytes(piece):
            raise ValueError(f"{payload.nbytes} bytes for {piece}")
        size, wire_size = self._block_size, self.wire.block_size
        start = 0
        for token, count in runs(piece.first_token, piece.num_tokens, wire_size, wire_size):
            first_block = token // size
            end = start + self.wire.num_bytes(
                KvRange(token, count, piece.first_layer, piece.num_layers)
            )
            yield _Run(
                block_ids[first_block : -(-(token + count) // size)],
                token - first_block * size,
                count,
                payload[start:end],
            )
            start = end


@dataclass(frozen=True, slots=True)
class _Run:
    """The part of a payload that came from one block of the sender: the pool's blocks that it touches, its first token
    in them, its tokens, its bytes on the wire."""

    block_ids: Sequence[int]
    first_token: int
    num_tokens: int
    data: memoryview


def lend_chunk(
    pool: LendingPool, layout: KvLayout, block_ids: Sequence[int], piece: KvRange
) -> tuple[memoryview, ...]:
    """The plain payload as it lies in the sender's blocks; nothing if it has to be packed. Raises ValueError as pack does."""
    size = layout.block_size
    first, rest = divmod(piece.first_token, size)
    if (
        rest
        or piece.num_tokens % size
        or size * piece.num_layers * layout.token_layer_bytes < MIN_LENT_BYTES
    ):
        return ()
    if piece.end_token > len(block_ids) * size:
        raise ValueError(f"{piece} in {len(block_ids)} blocks of {size}")
    blocks = block_ids[first : piece.end_token // size]
    lent = [pool.lend(block_id, piece.first_layer, piece.num_layers) for block_id in blocks]
    return tuple(view for view in lent if view is not None)
