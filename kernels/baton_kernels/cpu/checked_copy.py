"""Whole blocks to and from a contiguous payload, and the payload's xxh3_64 in the same pass over
its bytes.

Twin: copy, then xxhash.xxh3_64_intdigest(payload, seed). One pass reads each byte once, and on the
way into the pool it writes past the caches, which a copy of numpy does for single pieces of many
megabytes only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch

from baton_kernels.cpu.library import library

#: The kernel copies vectors of so many bytes.
_STRIPE_BYTES = 64
#: Shorter payloads are hashed in another way.
_MIN_BYTES = 241


def checked_copy_of(pool: torch.Tensor) -> CheckedCopy | None:
    """Of a pool [blocks, layers, ...] in host memory; None without the native library, or for
    blocks that it cannot copy."""
    native = library()
    layer_bytes = pool[0, 0].nbytes
    if native is None or layer_bytes % _STRIPE_BYTES or pool.data_ptr() % _STRIPE_BYTES:
        return None
    return CheckedCopy(native, pool)


class CheckedCopy:
    """Ranges are the caller's to check. Thread-safe for distinct blocks; no call holds the GIL
    while it copies."""

    def __init__(self, native: ctypes.CDLL, pool: torch.Tensor) -> None:
        self._native = native
        self._pool = pool
        self._address = pool.data_ptr()
        self._block_bytes = pool[0].nbytes
        self._layer_bytes = pool[0, 0].nbytes

    def fits(self, num_blocks: int, num_layers: int) -> bool:
        """Whether a payload of so much can be copied here."""
        return num_blocks * num_layers * self._layer_bytes >= _MIN_BYTES

    def gather(
        self,
        block_ids: Sequence[int],
        first_layer: int,
        num_layers: int,
        packed: memoryview,
        seed: int,
    ) -> int:
        """Fill `packed` with these blocks' layers, one block after the other; its xxh3_64."""
        return self._call(
            self._native.baton_checked_gather, block_ids, first_layer, num_layers, packed, seed
        )

    def scatter(
        self,
        block_ids: Sequence[int],
        first_layer: int,
        num_layers: int,
        packed: memoryview,
        seed: int,
    ) -> int:
        """The inverse; the xxh3_64 of the very bytes that were written."""
        return self._call(
            self._native.baton_checked_scatter, block_ids, first_layer, num_layers, packed, seed
        )

    def _call(
        self,
        function: Callable[..., None],
        block_ids: Sequence[int],
        first_layer: int,
        num_layers: int,
        packed: memoryview,
        seed: int,
    ) -> int:
        count = len(block_ids)
        piece_bytes = num_layers * self._layer_bytes
        if packed.nbytes != count * piece_bytes:
            raise ValueError(f"{packed.nbytes} bytes for {count} pieces of {piece_bytes}")
        ids = (ctypes.c_long * count)(*block_ids)
        data = np.frombuffer(packed, np.uint8)
        checksum = ctypes.c_uint64()
        function(
            self._address + first_layer * self._layer_bytes,
            self._block_bytes,
            piece_bytes,
            ids,
            count,
            data.ctypes.data,
            seed,
            ctypes.byref(checksum),
        )
        return checksum.value
