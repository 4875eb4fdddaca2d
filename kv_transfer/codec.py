"""A chunk's bytes: how they are read from, and written to, the blocks of a pool.

A payload is the sender's blocks one after the other: of each block that the chunk's tokens lie in, those tokens as
[layers, 2, kv_heads, tokens, head_dim]. So a sender copies each block in one piece, and so does a receiver whose blocks
have the same size; others take the pieces apart. The sender's block size is known from its KvHello.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import xxhash

from baton.engine.interface import KvPool
from baton.types import KvLayout
from kv_transfer.chunking import runs
from kv_transfer.coverage import KvRange

#: Shorter pieces are packed together: gathering costs about as much for each piece as copying this many bytes.
MIN_LENT_BYTES = 32 * 1024


@runtime_checkable
class LendingPool(Protocol):
    """A pool whose blocks can be read where they lie, if that is in host memory."""

    def lend(self, block_id: int, first_layer: int, num_layers: int) -> memoryview | None:
        """The bytes of a whole block's layers, to be read only; None off the host. Raises ValueError for a wrong range."""
        ...


def pack_chunk(pool: KvPool, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
    """Fill `out` with a payload from the sender's blocks. Raises what KvPool.pack does; ValueError for another size."""
    for blocks, first, count, at in _pieces(pool, block_ids, piece, pool.layout.block_size, out):
        pool.pack(blocks, first, count, piece.first_layer, piece.num_layers, at)


def unpack_chunk(
    pool: KvPool, block_ids: Sequence[int], piece: KvRange, sender_block_size: int, data: memoryview
) -> None:
    """Write a payload into the receiver's blocks. Raises what KvPool.unpack does; ValueError for another size."""
    for blocks, first, count, at in _pieces(pool, block_ids, piece, sender_block_size, data):
        pool.unpack(blocks, first, count, piece.first_layer, piece.num_layers, at)


def checksum_of(payload: Sequence[memoryview]) -> int:
    """xxh3_64 of the pieces one after the other."""
    if len(payload) == 1:
        return xxhash.xxh3_64_intdigest(payload[0])
    digest = xxhash.xxh3_64()
    for piece in payload:
        digest.update(piece)
    return digest.intdigest()


def lend_chunk(
    pool: LendingPool, layout: KvLayout, block_ids: Sequence[int], piece: KvRange
) -> tuple[memoryview, ...]:
    """The payload as it lies in the sender's blocks; nothing if it has to be packed. Raises ValueError as pack_chunk does."""
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


def _pieces(
    pool: KvPool, block_ids: Sequence[int], piece: KvRange, wire_block_size: int, buffer: memoryview
) -> Iterator[tuple[Sequence[int], int, int, memoryview]]:
    """Per piece of the payload: the pool's blocks that it touches, its first token in them, its tokens, its bytes."""
    layout = pool.layout
    size = layout.block_size
    num_token_bytes = piece.num_layers * layout.token_layer_bytes
    if buffer.nbytes != piece.num_tokens * num_token_bytes:
        raise ValueError(f"{buffer.nbytes} bytes for {piece}")
    start = 0
    for token, count in runs(piece.first_token, piece.num_tokens, wire_block_size, wire_block_size):
        first_block = token // size
        end = start + count * num_token_bytes
        yield (
            block_ids[first_block : -(-(token + count) // size)],
            token - first_block * size,
            count,
            buffer[start:end],
        )
        start = end
