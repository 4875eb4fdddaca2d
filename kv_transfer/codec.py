"""Chunk payloads: read from, and written to, the blocks of a pool.

A payload is a sequence of runs, one per sender block that the chunk's tokens lie in; see
WireFormat. A sender copies each block in one piece, as does a receiver with blocks of the same
size; a receiver with another size splits the runs. If a peer's dtype differs from the wire's, its
device converts, or the host converts each run while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import xxhash

from engine.kv.interface import BlockMemory, CheckedCopy, KvPool
from engine.kv.range import ALL, KvRange
from kv_transfer.transcoder import Transcoder
from kv_transfer.wire_format import WireFormat, runs

#: Minimum piece that is sent without packing: gathering costs about as much per piece as copying
#: this many bytes.
MIN_VIEW_BYTES = 32 * 1024


@runtime_checkable
class StagingPool(Protocol):
    """A pool with blocks in device memory that can pack a whole payload for the host."""

    @property
    def device_copy(self) -> StagedCopy | None:
        """None if no device copy is available."""
        ...


class StagedCopy(Protocol):
    """See engine.kv.tensors.device_copy."""

    def fits(self, piece: KvRange, wire: WireFormat) -> bool: ...

    def pack_to_host(
        self, block_ids: Sequence[int], piece: KvRange, wire: WireFormat, data: memoryview
    ) -> None: ...

    def unpack_from_host(
        self, block_ids: Sequence[int], piece: KvRange, wire: WireFormat, data: memoryview
    ) -> None: ...


#: A piece for a CheckedCopy: blocks, then (first, count) of tokens in them, and of layers.
_Place = tuple[Sequence[int], tuple[int, int], tuple[int, int]]


class ChunkCodec:
    """Packs and unpacks the payloads of one connection. Used by one thread at a time."""

    def __init__(self, pool: KvPool, wire: WireFormat) -> None:
        """Raises ValueError if the pool's dtype cannot be converted to the wire's and back."""
        layout = pool.layout
        self.wire = wire
        self._pool = pool
        self._block_size = layout.block_size
        # Without a conversion, KV is copied directly between blocks and payload.
        is_plain = wire.is_that_of(layout.dtype)
        self._transcoder = None if is_plain else Transcoder(layout.dtype, wire)
        self._staged_copy = pool.device_copy if isinstance(pool, StagingPool) else None
        self._token_layer_bytes = layout.token_layer_bytes
        self._scratch = memoryview(b"")
        is_straight = self._transcoder is None and wire.block_size == layout.block_size
        # By group, the memory that stores its pieces contiguously. The pool splits pieces of other
        # groups.
        self._viewable: dict[int, BlockMemory] = {}
        numbers = (ALL, *(group.number for group in pool.groups.paged)) if is_straight else ()
        for number in numbers:
            memory = pool.memory_of(number)
            if memory is not None and memory.has_block_views:
                self._viewable[number] = memory
        self._checked_copies = {
            number: memory.checked_copy for number, memory in self._viewable.items()
        }

    @property
    def is_plain(self) -> bool:
        """Whether payloads hold the pool's bytes unconverted."""
        return self._transcoder is None

    def for_another_thread(self) -> ChunkCodec:
        return ChunkCodec(self._pool, self.wire)

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        """Pack a payload from the blocks into `out`. Raises what KvPool.pack does, and ValueError
        for a wrong size."""
        if not self._pool.groups.is_paged(piece):
            self._pool.pack(block_ids, piece, out)
            return
        if staged := self._staged_copy_for(piece):
            staged.pack_to_host(block_ids, piece, self.wire, out)
            return
        for run in self._runs(block_ids, piece, out):
            if self._transcoder is None:
                self._pool.pack(run.block_ids, run.piece, run.data)
            else:
                bits = self._room(run.piece)
                self._pool.pack(run.block_ids, run.piece, bits)
                self._transcoder.encode(bits, run.piece.num_tokens, piece.num_layers, run.data)

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        """Unpack a payload into the blocks. Raises what KvPool.unpack does, and ValueError for a
        wrong size."""
        if not self._pool.groups.is_paged(piece):
            self._pool.unpack(block_ids, piece, data)
            return
        if staged := self._staged_copy_for(piece):
            staged.unpack_from_host(block_ids, piece, self.wire, data)
            return
        for run in self._runs(block_ids, piece, data):
            bits = run.data
            if self._transcoder is not None:
                bits = self._room(run.piece)
                self._transcoder.decode(run.data, run.piece.num_tokens, piece.num_layers, bits)
            self._pool.unpack(run.block_ids, run.piece, bits)

    def can_view(self, piece: KvRange) -> bool:
        """Whether the payload equals whole pool blocks, in pieces long enough to send without
        packing."""
        return bool(
            piece.group in self._viewable
            and _is_whole(piece, self._block_size)
            and self._block_size * piece.num_layers * self._token_layer_bytes >= MIN_VIEW_BYTES
        )

    def views(self, block_ids: Sequence[int], piece: KvRange) -> tuple[memoryview, ...]:
        """Views of the blocks as the pieces of a payload; empty unless can_view. Raises ValueError
        as pack does."""
        if not self.can_view(piece):
            return ()
        memory, blocks = self._viewable[piece.group], self._blocks(block_ids, piece)
        return tuple(
            memory.block_view(block_id, piece.first_layer, piece.num_layers) for block_id in blocks
        )

    def pack_checked(
        self, block_ids: Sequence[int], piece: KvRange, out: memoryview, seed: int
    ) -> int:
        """Pack, and return the payload's xxh3_64."""
        if found := self._checked(block_ids, piece, out):
            copy, place = found
            return copy.gather(*place, out, seed)
        self.pack(block_ids, piece, out)
        return xxhash.xxh3_64_intdigest(out, seed)

    def unpack_checked(
        self, block_ids: Sequence[int], piece: KvRange, data: memoryview, seed: int, checksum: int
    ) -> bool:
        """Unpack, and return whether the payload's xxh3_64 equals `checksum`. If not, the blocks
        hold old or new bytes."""
        if found := self._checked(block_ids, piece, data):
            copy, place = found
            return copy.scatter(*place, data, seed) == checksum
        if xxhash.xxh3_64_intdigest(data, seed) != checksum:
            return False
        self.unpack(block_ids, piece, data)
        return True

    def _staged_copy_for(self, piece: KvRange) -> StagedCopy | None:
        """The device copy for this piece in the wire's dtype; None if there is none."""
        staged = self._staged_copy
        return staged if staged and staged.fits(piece, self.wire) else None

    def _checked(
        self, block_ids: Sequence[int], piece: KvRange, payload: memoryview
    ) -> tuple[CheckedCopy, _Place] | None:
        """The checked copy for this piece and its place; None if no copy supports it. Raises
        ValueError if the piece is outside the blocks."""
        copy, size = self._checked_copies.get(piece.group), self._block_size
        if not copy or payload.nbytes < copy.min_bytes:
            return None
        if not copy.copies_rows and not _is_whole(piece, size):
            return None
        tokens = piece.first_token % size, piece.num_tokens
        layers = piece.first_layer, piece.num_layers
        return copy, (self._blocks(block_ids, piece), tokens, layers)

    def _blocks(self, block_ids: Sequence[int], piece: KvRange) -> Sequence[int]:
        """The pool's ids of the blocks of a piece, in its group. Raises ValueError if the piece is
        outside."""
        size, pool = self._block_size, self._pool
        blocks = block_ids[piece.first_token // size : -(-piece.end_token // size)]
        if (
            min(piece.first_token, piece.first_layer, piece.num_layers) < 0
            or piece.end_token > len(block_ids) * size
            or piece.end_layer > pool.groups.num_layers(piece.group)
            or not 0 <= min(blocks) <= max(blocks) < pool.num_blocks
        ):
            raise ValueError(f"{piece} in {len(block_ids)} blocks of {size}")
        return pool.ids_in(piece.group, blocks)

    def _room(self, piece: KvRange) -> memoryview:
        """Scratch memory for a run of pool elements, reused."""
        num_bytes = piece.num_bytes(self._token_layer_bytes)
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
            run = replace(piece, first_token=token, num_tokens=count)
            end = start + self.wire.num_bytes(run)
            yield _Run(
                block_ids[first_block : -(-run.end_token // size)],
                replace(run, first_token=token - first_block * size),
                payload[start:end],
            )
            start = end


@dataclass(frozen=True, slots=True)
class _Run:
    """Part of a payload from one block of the sender: the blocks of this pool that it covers, its
    range in them, and its wire bytes."""

    block_ids: Sequence[int]
    piece: KvRange
    data: memoryview


def _is_whole(piece: KvRange, block_size: int) -> bool:
    """Whether a piece starts and ends at block boundaries."""
    return bool(piece.num_tokens) and not (
        piece.first_token % block_size or piece.num_tokens % block_size
    )
