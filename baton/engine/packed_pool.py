"""What pools of tensors share: the bytes of a range, seen as the arrays that each of them copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.types import DTYPE_BYTES, SCALE_BYTES, SCALED_DTYPES, KvLayout

#: Which tokens and layers of a sequence: its block table, first token, number of tokens, first layer, number of layers.
Span = tuple[Sequence[int], int, int, int, int]
PackedPart = NDArray[np.signedinteger]

#: Integers as wide as an element: packing moves bits, and numpy knows neither bfloat16 nor fp8.
_BITS: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {4: np.dtype(np.int32), 2: np.dtype(np.int16), 1: np.dtype(np.int8)}
)


class PackedPool(ABC):
    """The half of baton.engine.interface.KvPool that checks a range and its bytes. The other half copies them."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self._layout = layout
        self._num_blocks = num_blocks

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def pack(
        self,
        block_ids: Sequence[int],
        first_token: int,
        num_tokens: int,
        first_layer: int,
        num_layers: int,
        out: memoryview,
    ) -> None:
        """See KvPool. Raises ValueError if a range or a size is wrong; `out` must be writable."""
        if out.readonly:
            raise ValueError("cannot pack into a read-only buffer")
        span = (block_ids, first_token, num_tokens, first_layer, num_layers)
        self.pack_parts(span, _packed_parts(self._layout, self._num_blocks, span, out))

    def unpack(
        self,
        block_ids: Sequence[int],
        first_token: int,
        num_tokens: int,
        first_layer: int,
        num_layers: int,
        data: memoryview,
    ) -> None:
        """See KvPool. Raises ValueError if a range or a size is wrong."""
        span = (block_ids, first_token, num_tokens, first_layer, num_layers)
        self.unpack_parts(span, _packed_parts(self._layout, self._num_blocks, span, data))

    @abstractmethod
    def pack_parts(self, span: Span, parts: Sequence[PackedPart]) -> None:
        """Copy a range, which is within the pool, into its parts: [num_layers, 2, kv_heads, num_tokens, head_dim], and
        [num_layers, 2, kv_heads, num_tokens, 1] of scales if the layout has any."""

    @abstractmethod
    def unpack_parts(self, span: Span, parts: Sequence[PackedPart]) -> None:
        """The inverse."""


def _packed_parts(
    layout: KvLayout, num_blocks: int, span: Span, data: memoryview
) -> list[PackedPart]:
    """`data` as PackedPool.pack_parts has it, without a copy.

    Raises ValueError if `span` is not within a pool of `num_blocks`, or `data` has another size.
    """
    block_ids, first_token, num_tokens, first_layer, num_layers = span
    if first_token < 0 or num_tokens < 0 or first_layer < 0 or num_layers < 0:
        raise ValueError("ranges must not be negative")
    if first_layer + num_layers > layout.num_layers:
        raise ValueError(f"layers end at {first_layer + num_layers} of {layout.num_layers}")
    if first_token + num_tokens > len(block_ids) * layout.block_size:
        raise ValueError(f"tokens end at {first_token + num_tokens}, past {len(block_ids)} blocks")
    if any(not 0 <= block < num_blocks for block in block_ids):
        raise ValueError(f"a block id is not in [0, {num_blocks})")
    if data.nbytes != num_layers * num_tokens * layout.token_layer_bytes:
        raise ValueError(
            f"{data.nbytes} bytes do not hold {num_tokens} tokens of {num_layers} layers"
        )
    heads = (num_layers, 2, layout.num_kv_heads)
    num_elements = num_tokens * layout.head_dim
    if layout.dtype not in SCALED_DTYPES:
        array = np.frombuffer(data, dtype=_BITS[DTYPE_BYTES[layout.dtype]])
        return [array.reshape(*heads, num_tokens, layout.head_dim)]
    array = np.frombuffer(data, dtype=np.int8).reshape(
        *heads, num_elements + num_tokens * SCALE_BYTES
    )
    codes = array[..., :num_elements].reshape(*heads, num_tokens, layout.head_dim)
    return [codes, array[..., num_elements:].view(np.int32)[..., None]]
