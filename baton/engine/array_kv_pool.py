"""A KV pool in a numpy array: the oracle engine's memory, and the pool that tests of the KV channel
use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.engine.interface import HostOrdered, SlotTable
from baton.engine.state_memory import StateMemory
from baton.types import KvGroup, KvLayout, KvRange

#: The numpy type that holds an element of KvLayout.dtype; numpy has no bfloat16, whose bits are
#: kept as they are.
_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "float32": np.dtype(np.float32),
        "float16": np.dtype(np.float16),
        "bfloat16": np.dtype(np.uint16),
        "int64": np.dtype(np.int64),
    }
)


class ArrayKvPool(HostOrdered):
    """KV blocks of `layout`, all zero at first. Implements baton.engine.interface.KvPool.

    `data` is the pool itself, [num_blocks, num_layers, parts, num_kv_heads, block_size, head_dim].
    Its owner reads and writes it in place: that of block i at data[i], or, of windowed layers that
    have slots of their own, at that of its slot. Copies in and out hold no GIL while they move more
    than a few elements. `states` are those of sequences, if the layout has any.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_window_slots: int = 0,
        num_state_slots: int = 0,
    ) -> None:
        """num_window_slots: 0 if blocks have the KV of all layers. num_state_slots: read if the
        layout has states. Raises ValueError if there are no blocks, or the layout's dtype is
        unknown."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, not {num_blocks}")
        if layout.dtype not in _DTYPES:
            raise ValueError(f"dtype {layout.dtype!r} is not one of {', '.join(_DTYPES)}")
        self._layout = layout
        self.slots = SlotTable.of_blocks(num_blocks, num_window_slots) if num_window_slots else None
        self.states = (
            StateMemory(layout, num_blocks, num_state_slots) if layout.has_states else None
        )
        self.state_slots = self.states.slots if self.states else None
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

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return len(self.data)

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        """See KvPool. Raises ValueError also for a range of nothing."""
        if self.states and piece.group is KvGroup.STATE:
            self.states.pack(block_ids, piece, out)
            return
        wire = self._wire(piece, out)
        for place, layers, inside, (own, tokens) in self._in_blocks(block_ids, piece):
            wire[own, :, :, tokens] = self.data[place, layers, :, :, inside]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See KvPool."""
        if self.states:
            self.states.copy(sources, targets)
        if self.slots is None:
            self.data[list(targets)] = self.data[list(sources)]
            return
        whole = KvRange(0, self._layout.block_size, 0, self._layout.num_layers)
        for run, own in self._layout.runs_of_group(whole):
            layers, slots = slice(run.first_layer, run.end_layer), self.slots.of_block
            for source, target in zip(sources, targets, strict=True):
                if own.group is KvGroup.FULL:
                    self.data[target, layers] = self.data[source, layers]
                elif slots[source] >= 0:
                    self.data[slots[target], layers] = self.data[slots[source], layers]

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        """See KvPool. Raises ValueError also for a range of nothing."""
        if self.states and piece.group is KvGroup.STATE:
            self.states.unpack(block_ids, piece, data)
            return
        wire = self._wire(piece, data)
        for place, layers, inside, (own, tokens) in list(self._in_blocks(block_ids, piece)):
            self.data[place, layers, :, :, inside] = wire[own, :, :, tokens]

    @property
    def has_block_views(self) -> bool:
        """See ViewablePool."""
        return self.slots is None

    def block_view(self, block_id: int, first_layer: int, num_layers: int) -> memoryview:
        """See ViewablePool."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} of {self.num_blocks}")
        layers = self.data[block_id, self._layers(first_layer, num_layers)]
        return layers.data.cast("B")

    def _wire(self, piece: KvRange, buffer: memoryview) -> NDArray[Any]:
        """`buffer` as [num_layers, parts, num_kv_heads, num_tokens, head_dim]."""
        layout, num_tokens, num_layers = self._layout, piece.num_tokens, piece.num_layers
        expected = piece.num_bytes(layout.token_layer_bytes)
        if num_tokens < 1 or num_layers < 1 or buffer.nbytes != expected:
            raise ValueError(f"{buffer.nbytes} bytes for {piece}, not {expected}")
        shape = (
            *(num_layers, layout.num_parts, layout.num_kv_heads),
            *(num_tokens, layout.head_dim),
        )
        return np.frombuffer(buffer, dtype=self.data.dtype).reshape(shape)

    def _layers(self, first_layer: int, num_layers: int) -> slice:
        if first_layer < 0 or first_layer + num_layers > self._layout.num_layers:
            raise ValueError(
                f"layers [{first_layer}, {first_layer + num_layers}) of {self._layout.num_layers}"
            )
        return slice(first_layer, first_layer + num_layers)

    def _in_blocks(
        self, block_ids: Sequence[int], piece: KvRange
    ) -> Iterator[tuple[int, slice, slice, tuple[slice, slice]]]:
        """Per block of a piece, and run of layers that lie together: where it is in `data`, the
        layers, the positions inside it, and both's places in the piece."""
        slots, layout = self.slots, self._layout
        if piece.first_layer < 0 or piece.end_layer > layout.num_layers_of(piece.group):
            raise ValueError(f"{piece} in {layout.num_layers} layers")
        runs = list(layout.runs_of_group(piece))
        size, first_token, end = self._layout.block_size, piece.first_token, piece.end_token
        if first_token < 0 or end > len(block_ids) * size:
            raise ValueError(f"tokens [{first_token}, {end}) in {len(block_ids)} blocks of {size}")
        for index in range(first_token // size, -(-end // size)):
            block_id = block_ids[index]
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"block {block_id} of {self.num_blocks}")
            start, stop = max(first_token, index * size), min(end, (index + 1) * size)
            inside = slice(start - index * size, stop - index * size)
            tokens = slice(start - first_token, stop - first_token)
            end_layer = 0
            for run, own in runs:
                is_windowed = own.group is KvGroup.WINDOWED
                place = slots.of_block[block_id] if slots and is_windowed else block_id
                if place < 0:
                    raise ValueError(f"block {block_id} has no slot for windowed layers")
                first_layer, end_layer = end_layer, end_layer + run.num_layers
                places = slice(first_layer, end_layer), tokens
                yield place, slice(run.first_layer, run.end_layer), inside, places
