"""Copies ranges of a pool's blocks in device memory to host memory and back through pinned pieces:
sequences that are swapped, tiers of KV, and payloads that no device packs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton_kernels.kv_pack import kv_pack, kv_unpack
from engine.kv.range import KvRange
from engine.kv.tensors.copy_order import CopyOrder
from engine.kv.tensors.packed import PackedPart
from engine.kv.tensors.pinned_staging import PinnedStagingBuffer


class PinnedCopy:
    """Copies in the calling thread, on its stream of `order`; complete on return. Thread-safe for
    distinct blocks."""

    def __init__(self, device: torch.device, order: CopyOrder) -> None:
        self._order, self._pinned = order, PinnedStagingBuffer(device)

    def pack(
        self, slab: torch.Tensor, block_ids: Sequence[int], piece: KvRange, packed: PackedPart
    ) -> None:
        """See baton_kernels.kv_pack.kv_pack. slab: integers of the width of `packed`."""
        whole = packed if packed.flags.c_contiguous else np.empty(packed.shape, packed.dtype)
        with self._order.copying():
            staging = self._pinned.staging(whole.nbytes)
            there = staging.view(slab.dtype).view(whole.shape)
            kv_pack(slab, block_ids, piece.first_token, piece.first_layer, there)
            self._pinned.to_host(staging, _bytes_of(whole))
        if whole is not packed:
            packed[...] = whole

    def unpack(
        self, slab: torch.Tensor, block_ids: Sequence[int], piece: KvRange, packed: PackedPart
    ) -> None:
        """Inverse of pack."""
        whole = np.ascontiguousarray(packed)
        with self._order.copying():
            staging = self._pinned.staging(whole.nbytes)
            self._pinned.to_device(_bytes_of(whole), staging)
            there = staging.view(slab.dtype).view(whole.shape)
            kv_unpack(slab, block_ids, piece.first_token, piece.first_layer, there)


def _bytes_of(whole: PackedPart) -> memoryview:
    return whole.reshape(-1).view(np.uint8).data
