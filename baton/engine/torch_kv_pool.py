"""The torch engine's KV blocks, and their packing for the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from baton.types import DTYPE_BYTES, KvLayout
from baton_kernels.cpu.memory import host_memory
from baton_kernels.kv_pack import Slab, kv_pack, kv_unpack

#: Integers as wide as an element: packing moves bits, and numpy knows no bfloat16.
_BITS = {4: (torch.int32, np.int32), 2: (torch.int16, np.int16)}


class TorchKvPool:
    """One tensor [blocks, layers, 2, kv_heads, block_size, head_dim], every page of it touched at creation.

    `pack` and `unpack` may be called from any thread; the caller owns the blocks it names. On the CPU they copy once, straight
    from or to the caller's bytes, on the calling thread and without the GIL.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        shape = (
            num_blocks,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        dtype = getattr(torch, layout.dtype)
        if device.type == "cpu":
            self.tensor = host_memory(num_blocks * layout.block_bytes).view(dtype).view(shape)
        else:
            self.tensor = torch.empty(shape, dtype=dtype, device=device)
        # Touches every page now, so that no step pays for it.
        self.tensor.zero_()
        bits, self._array_dtype = _BITS[DTYPE_BYTES[layout.dtype]]
        view = self.tensor.view(bits)
        self._bits: Slab = view.numpy() if device.type == "cpu" else view
        self._is_host = device.type == "cpu"

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
        packed = self._packed(block_ids, first_token, num_tokens, first_layer, num_layers, out)
        if self._is_host:
            kv_pack(self._bits, block_ids, first_token, first_layer, packed)
        else:
            staging = torch.empty(packed.shape, dtype=torch.from_numpy(packed).dtype)
            kv_pack(self._bits, block_ids, first_token, first_layer, staging)
            packed[...] = staging.numpy()

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
        packed = self._packed(block_ids, first_token, num_tokens, first_layer, num_layers, data)
        source: Slab = packed if self._is_host else torch.utils.dlpack.from_dlpack(packed)
        kv_unpack(self._bits, block_ids, first_token, first_layer, source)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See KvPool."""
        device = self.tensor.device
        self.tensor.index_copy_(
            0,
            torch.tensor(targets, device=device),
            self.tensor[torch.tensor(sources, device=device)],
        )

    def lend(self, block_id: int, first_layer: int, num_layers: int) -> memoryview | None:
        """The bytes of a whole block's layers, to be read only; None off the host. Raises ValueError for a wrong range."""
        if not self._is_host:
            return None
        if not 0 <= block_id < self._num_blocks:
            raise ValueError(f"block {block_id} is not in [0, {self._num_blocks})")
        if not 0 <= first_layer < first_layer + num_layers <= self._layout.num_layers:
            raise ValueError(f"layers [{first_layer}, {first_layer + num_layers})")
        layers = self._bits[block_id, first_layer : first_layer + num_layers]
        view: memoryview = layers.data
        return view.cast("B").toreadonly()

    def _packed(
        self,
        block_ids: Sequence[int],
        first_token: int,
        num_tokens: int,
        first_layer: int,
        num_layers: int,
        data: memoryview,
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]:
        """`data` as [num_layers, 2, kv_heads, num_tokens, head_dim], without a copy."""
        layout = self._layout
        if first_token < 0 or num_tokens < 0 or first_layer < 0 or num_layers < 0:
            raise ValueError("ranges must not be negative")
        if first_layer + num_layers > layout.num_layers:
            raise ValueError(f"layers end at {first_layer + num_layers} of {layout.num_layers}")
        if first_token + num_tokens > len(block_ids) * layout.block_size:
            raise ValueError(
                f"tokens end at {first_token + num_tokens}, past {len(block_ids)} blocks"
            )
        if any(not 0 <= block < self._num_blocks for block in block_ids):
            raise ValueError(f"a block id is not in [0, {self._num_blocks})")
        shape = (num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)
        array = np.frombuffer(data, dtype=self._array_dtype)
        if array.size != math.prod(shape):
            raise ValueError(f"{data.nbytes} bytes do not hold {shape} of {layout.dtype}")
        return array.reshape(shape)
