"""A KV pool in a numpy array, for the oracle engine and for tests of the KV channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.types import KvLayout
from engine.kv.groups.state import STATE
from engine.kv.interface import HostOrdered
from engine.kv.range import KvRange
from engine.kv.tensors.packed import ALL_HEADS, PackedPart, PackedPool
from engine.kv.tensors.state_memory import StateMemory

#: numpy type for each KvLayout.dtype; bfloat16, unknown to numpy, is kept as raw bits.
_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "float32": np.dtype(np.float32),
        "float16": np.dtype(np.float16),
        "bfloat16": np.dtype(np.uint16),
        "int64": np.dtype(np.int64),
    }
)


class ArrayKvPool(HostOrdered, PackedPool):
    """KV blocks of `layout`, initially zero. Implements engine.kv.interface.KvPool.

    data: [num_blocks, num_layers, parts, num_kv_heads, block_size, head_dim], read and written in
    place by its owner. Large copies release the GIL. states: states of sequences, if the layout has
    any.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, num_state_slots: int = 0) -> None:
        """num_state_slots: used if the layout has states. Raises ValueError if there are no blocks,
        or the layout's dtype is unknown."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, not {num_blocks}")
        if layout.dtype not in _DTYPES:
            raise ValueError(f"dtype {layout.dtype!r} is not one of {', '.join(_DTYPES)}")
        self.states = (
            StateMemory(layout, num_blocks, num_state_slots) if layout.num_state_layers else None
        )
        super().__init__(layout, num_blocks, {STATE: self.states} if self.states else {})
        self.data: NDArray[Any] = np.zeros(
            (
                num_blocks,
                layout.num_layers,
                layout.num_parts,
                layout.num_kv_heads,
                layout.block_size,
                layout.head_dim,
            ),
            dtype=_DTYPES[layout.dtype],
        )

    def pack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        (wire,) = parts
        bits, layers = self.data.view(wire.dtype), slice(piece.first_layer, piece.end_layer)
        for block_id, inside, tokens in self._in_blocks(block_ids, piece):
            wire[:, :, :, tokens] = bits[block_id, layers, :, heads, inside]

    def unpack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        (wire,) = parts
        bits, layers = self.data.view(wire.dtype), slice(piece.first_layer, piece.end_layer)
        for block_id, inside, tokens in self._in_blocks(block_ids, piece):
            bits[block_id, layers, :, heads, inside] = wire[:, :, :, tokens]

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.data[list(targets)] = self.data[list(sources)]

    has_block_views = True

    def block_view(self, block_id: int, first_layer: int, num_layers: int) -> memoryview:
        """See BlockMemory."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} of {self.num_blocks}")
        end = first_layer + num_layers
        if not 0 <= first_layer <= end <= self.layout.num_layers:
            raise ValueError(f"layers [{first_layer}, {end}) of {self.layout.num_layers}")
        return self.data[block_id, first_layer:end].data.cast("B")

    def _in_blocks(
        self, block_ids: Sequence[int], piece: KvRange
    ) -> Iterator[tuple[int, slice, slice]]:
        """Blocks of a piece: (block id, positions in the block, positions in the piece) each."""
        size, first_token, end = self.layout.block_size, piece.first_token, piece.end_token
        for index in range(first_token // size, -(-end // size)):
            start, stop = max(first_token, index * size), min(end, (index + 1) * size)
            inside = slice(start - index * size, stop - index * size)
            yield block_ids[index], inside, slice(start - first_token, stop - first_token)
