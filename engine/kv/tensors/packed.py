"""Base of pools: checks ranges, and views their bytes as arrays to copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.types import DTYPE_BYTES, SCALE_BYTES, SCALED_DTYPES, KvLayout
from engine.kv.groups.group import SlotTable
from engine.kv.interface import BlockMemory, CheckedCopy
from engine.kv.layout import LayerGroups, groups_of
from engine.kv.range import ALL, KvRange

PackedPart = NDArray[np.signedinteger]

#: KV heads of a copy: every head of the pool.
ALL_HEADS = slice(None)

#: Integers of an element's width: packing moves bits, and numpy lacks bfloat16 and fp8.
_BITS: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {8: np.dtype(np.int64), 4: np.dtype(np.int32), 2: np.dtype(np.int16), 1: np.dtype(np.int8)}
)

NO_RECORDS: Mapping[int, Any] = MappingProxyType({})


class RecordMemory(Protocol):
    """Records of an unpaged group, see engine.kv.groups."""

    @property
    def slots(self) -> SlotTable: ...

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None: ...

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None: ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...


class PackedPool(ABC):
    """The part of engine.kv.interface.KvPool that checks ranges and sizes. Subclasses copy rows in
    pack_parts and unpack_parts; a RecordMemory copies records."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, records: Mapping[int, RecordMemory] = NO_RECORDS
    ) -> None:
        """records: by group number."""
        self.layout = layout
        self.groups = groups_of(layout)
        self.num_blocks = num_blocks
        self.records = records
        self.slot_tables: Mapping[int, SlotTable] = {
            number: memory.slots for number, memory in records.items()
        }

    def identify(self, fingerprint: str) -> None:
        """Set the layout's fingerprint, known once all weights are read; before any other use."""
        self.layout = replace(self.layout, fingerprint=fingerprint)
        self.groups = groups_of(self.layout)

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        """See KvPool. Also raises ValueError if `out` is read-only."""
        if out.readonly:
            raise ValueError("cannot pack into a read-only buffer")
        if memory := self.records.get(piece.group):
            memory.pack(block_ids, piece, out)
            return
        for part, bits in self._parts(block_ids, piece, out):
            self.pack_parts(block_ids, part, bits)

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        if memory := self.records.get(piece.group):
            memory.unpack(block_ids, piece, data)
            return
        for part, bits in self._parts(block_ids, piece, data):
            self.unpack_parts(block_ids, part, bits)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.copy_rows(sources, targets)
        for memory in self.records.values():
            memory.copy(sources, targets)

    @abstractmethod
    def pack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        """Copy these KV heads of a checked range, as returned by `pieces_of`, to its elements
        [num_layers, parts, heads, num_tokens, head_dim], and its scales [num_layers, parts, heads,
        num_tokens, 1] if the layout has any."""

    @abstractmethod
    def unpack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        """Inverse of pack_parts."""

    @abstractmethod
    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See KvPool.copy_blocks; paged groups only."""

    def check(self, block_ids: Sequence[int], piece: KvRange) -> None:
        """Raise ValueError if a range is not within these blocks."""
        check_range(self.groups, self.num_blocks, block_ids, piece)

    def pieces_of(self, piece: KvRange) -> Iterable[KvRange]:
        """Split a range, in byte order, into ranges with layers side by side in this pool."""
        if piece.group == ALL:
            return (piece,)
        return (run for run, _ in self.groups.runs(piece))

    # See KvPool; subclasses override the fast paths that they have.

    can_pack = True
    has_block_views = False
    checked_copy: CheckedCopy | None = None

    def block_view(self, block_id: int, first_layer: int, num_layers: int) -> memoryview:
        """See BlockMemory."""
        raise ValueError(f"block {block_id} [{first_layer}, +{num_layers}) is not in host memory")

    def memory_of(self, group: int) -> BlockMemory | None:
        return self if group == ALL else None

    def ids_in(self, group: int, block_ids: Sequence[int]) -> Sequence[int]:
        del group
        return block_ids

    def _parts(
        self, block_ids: Sequence[int], piece: KvRange, data: memoryview
    ) -> Iterator[tuple[KvRange, list[PackedPart]]]:
        """View `data` as pack_parts expects it, range by range, without a copy. Raises ValueError
        as KvPool.pack does."""
        layout = self.layout
        self.check(block_ids, piece)
        if data.nbytes != piece.num_bytes(layout.token_layer_bytes):
            raise ValueError(f"{data.nbytes} bytes do not hold {piece}")
        bits, end = _split(layout, piece, data), 0
        for part in self.pieces_of(piece):
            start, end = end, end + part.num_layers
            yield part, [array[start:end] for array in bits]


def check_range(
    groups: LayerGroups, num_blocks: int, block_ids: Sequence[int], piece: KvRange
) -> None:
    """Raise ValueError if a range of rows is not within these blocks of a pool of num_blocks."""
    if min(piece.first_token, piece.num_tokens, piece.first_layer, piece.num_layers) < 0:
        raise ValueError(f"{piece} is negative")
    if piece.end_layer > (num_layers := groups.num_layers(piece.group)):
        raise ValueError(f"layers end at {piece.end_layer} of {num_layers}")
    if piece.end_token > len(block_ids) * groups.layout.block_size:
        raise ValueError(f"tokens end at {piece.end_token}, past {len(block_ids)} blocks")
    if any(not 0 <= block < num_blocks for block in block_ids):
        raise ValueError(f"a block id is not in [0, {num_blocks})")


def _split(layout: KvLayout, piece: KvRange, data: memoryview) -> list[PackedPart]:
    """View a piece's bytes as PackedPool.pack_parts expects them."""
    num_tokens = piece.num_tokens
    heads = (piece.num_layers, layout.num_parts, layout.num_kv_heads)
    num_elements = num_tokens * layout.head_dim
    if layout.dtype not in SCALED_DTYPES:
        array = np.frombuffer(data, dtype=_BITS[DTYPE_BYTES[layout.dtype]])
        return [array.reshape(*heads, num_tokens, layout.head_dim)]
    array = np.frombuffer(data, dtype=np.int8).reshape(
        *heads, num_elements + num_tokens * SCALE_BYTES
    )
    codes = array[..., :num_elements].reshape(*heads, num_tokens, layout.head_dim)
    return [codes, array[..., num_elements:].view(np.int32)[..., None]]
