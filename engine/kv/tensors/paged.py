"""The torch engine's KV blocks, and their packing for the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from baton.types import DTYPE_BYTES, SCALE_BYTES, SCALED_DTYPES, KvLayout
from baton_kernels.cpu.checked_copy import checked_copy_of
from baton_kernels.cpu.memory import host_memory
from baton_kernels.host_copy import to_device
from baton_kernels.kv_pack import Slab, kv_pack, kv_unpack
from engine.kv.range import KvRange
from engine.kv.tensors.copy_order import CopyOrder, copy_order
from engine.kv.tensors.cuda_memory import cuda_memory
from engine.kv.tensors.device_copy import PagedDeviceCopy
from engine.kv.tensors.grouped import GroupedKvPool, LayersPool
from engine.kv.tensors.grouped_copy import GroupedDeviceCopy, grouped_copy
from engine.kv.tensors.packed import ALL_HEADS, NO_RECORDS, PackedPart, PackedPool, RecordMemory
from engine.kv.tensors.pinned_copy import PinnedCopy
from engine.kv.tensors.prefault import prefault

#: Integers of an element's width: packing moves bits.
_BITS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
_DTYPES = {"fp8": torch.float8_e4m3fn}


class TorchKvPool(PackedPool):
    """Blocks as defined by KvLayout, in one allocation.

    tensor: [blocks, layers, parts, kv_heads, block_size, head_dim]; scales: [blocks, layers, parts,
    kv_heads, block_size] float32, only for SCALED_DTYPES. Both are views of the blocks. `pack` and
    `unpack` may be called from any thread; the caller owns the blocks. On the CPU they copy once,
    between blocks and the caller's bytes, in the calling thread, without the GIL; from and to a
    device through pinned memory, see PinnedCopy.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device,
        memory: torch.Tensor | None = None,
        records: Mapping[int, RecordMemory] = NO_RECORDS,
        order: CopyOrder | None = None,
    ) -> None:
        """memory: the blocks' bytes, uint8 on `device`, already backed by pages; allocated if not
        given. records: see PackedPool. order: of the records; by default, one of its own. Raises
        ValueError if scales would be misaligned."""
        super().__init__(layout, num_blocks, records)
        self._is_host = device.type == "cpu"
        self._order = order or copy_order(device)
        self.mark, self.follow = self._order.mark, self._order.follow
        self.synchronize = self._order.synchronize
        """See KvPool."""
        memory = memory if memory is not None else _fresh(num_blocks * layout.block_bytes, device)
        heads = (layout.num_parts, layout.num_kv_heads)
        head_bytes = layout.block_size * layout.token_layer_bytes // (heads[0] * heads[1])
        self._blocks = memory.view(num_blocks, layout.num_layers, *heads, head_bytes)
        row_bytes = layout.head_dim * DTYPE_BYTES[layout.dtype]
        dtype = _DTYPES.get(layout.dtype) or getattr(torch, layout.dtype)
        shape = (layout.block_size, layout.head_dim)
        rows = self._blocks[..., : layout.block_size * row_bytes]
        self.tensor = rows.view(dtype).unflatten(-1, shape)  # type: ignore[no-untyped-call]
        self.scales = self._scales(layout) if layout.dtype in SCALED_DTYPES else None
        self._views = [self.tensor.view(_BITS[DTYPE_BYTES[layout.dtype]])]
        if self.scales is not None:
            self._views.append(self.scales.view(torch.int32)[..., None])
        self._slabs: list[Slab] = [v.numpy() for v in self._views] if self._is_host else []
        self._pinned = None if self._is_host else PinnedCopy(device, self._order)
        # All bytes of a pool in host memory.
        self._bytes = self._blocks.view(-1).numpy().data if self._is_host else None
        self.has_block_views = self._is_host
        """See BlockMemory, as checked_copy."""
        self.checked_copy = None
        if self._is_host and layout.num_layers:
            self.checked_copy = checked_copy_of(self._blocks, row_bytes, layout.block_size)
        shared = None if self._is_host else cuda_memory(device)
        self._device_copy = (
            PagedDeviceCopy(layout, self._blocks, self._order, shared) if shared else None
        )

    def _scales(self, layout: KvLayout) -> torch.Tensor:
        num_bytes = layout.block_size * layout.head_dim
        if num_bytes % SCALE_BYTES:
            raise ValueError(f"block_size * head_dim = {num_bytes} is no multiple of {SCALE_BYTES}")
        return self._blocks[..., num_bytes:].view(torch.float32)

    def pack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        """See PackedPool."""
        if (pinned := self._pinned) is not None:
            for view, packed in zip(self._views, parts, strict=True):
                pinned.pack(view[:, :, :, heads], block_ids, piece, packed)
            return
        for slab, packed in zip(self._slabs, parts, strict=True):
            own = slab[:, :, :, heads]
            kv_pack(own, block_ids, piece.first_token, piece.first_layer, packed)

    def unpack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        """See PackedPool."""
        if (pinned := self._pinned) is not None:
            for view, packed in zip(self._views, parts, strict=True):
                pinned.unpack(view[:, :, :, heads], block_ids, piece, packed)
            return
        for slab, packed in zip(self._slabs, parts, strict=True):
            own = slab[:, :, :, heads]
            kv_unpack(own, block_ids, piece.first_token, piece.first_layer, packed)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        device = self.tensor.device
        at, to = (to_device(torch.tensor(ids), device) for ids in (sources, targets))
        for view in self._views:
            view.index_copy_(0, to, view[at])

    def block_view(self, block_id: int, first_layer: int, num_layers: int) -> memoryview:
        """See BlockMemory."""
        if self._bytes is None:
            raise ValueError("the blocks are not in host memory")
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not in [0, {self.num_blocks})")
        if not 0 <= first_layer < first_layer + num_layers <= self.layout.num_layers:
            raise ValueError(f"layers [{first_layer}, {first_layer + num_layers})")
        layout = self.layout
        layer_bytes = layout.block_size * layout.token_layer_bytes
        start = block_id * layout.block_bytes + first_layer * layer_bytes
        return self._bytes[start : start + num_layers * layer_bytes]

    @property
    def device_copy(self) -> PagedDeviceCopy | None:
        """Packs to and unpacks from memory of the blocks' device; None on a CPU or if memory cannot
        be shared."""
        return self._device_copy


class LayersTensor(LayersPool, Protocol):
    """tensor, scales: memory of this process's forward, as in TorchKvPool."""

    tensor: torch.Tensor
    scales: torch.Tensor | None


class GroupedTensorPool(GroupedKvPool[LayersTensor]):
    """GroupedKvPool over tensors. tensor, scales: of the layers in the blocks."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_slots: int,
        make_pool: Callable[[KvLayout, int], LayersTensor],
    ) -> None:
        super().__init__(layout, num_blocks, num_slots, make_pool)
        self.tensor, self.scales = self.in_blocks.tensor, self.in_blocks.scales


class GroupedDevicePool(GroupedTensorPool):
    """GroupedTensorPool on one device."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, num_slots: int, device: torch.device
    ) -> None:
        copies: list[PagedDeviceCopy | None] = []

        def make(own: KvLayout, num_blocks: int) -> TorchKvPool:
            pool = TorchKvPool(own, num_blocks, device)
            copies.append(pool.device_copy)
            return pool

        super().__init__(layout, num_blocks, num_slots, make)
        own = dict(zip(self.pools, copies, strict=True))
        self._device_copy = grouped_copy(own, self.ids_in, layout.block_size)

    @property
    def device_copy(self) -> GroupedDeviceCopy | None:
        """See TorchKvPool."""
        return self._device_copy


def host_pool(layout: KvLayout, num_blocks: int) -> TorchKvPool:
    """A pool in newly allocated host memory."""
    return TorchKvPool(layout, num_blocks, torch.device("cpu"))


def _fresh(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeroed uint8 memory; host pages are touched ahead of use where possible, so that steps do not
    fault."""
    if device.type == "cpu":
        memory = host_memory(num_bytes)
        return memory if prefault(memory) else memory.zero_()
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
