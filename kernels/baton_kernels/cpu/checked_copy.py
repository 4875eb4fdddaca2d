"""Copies rows of blocks to and from a contiguous payload and computes the payload's xxh3_64 in the
same pass.

Twin: copy, then xxhash.xxh3_64_intdigest(payload, seed). Each byte is read once, and writes into
the pool bypass the caches (numpy's copy does so only for single pieces of many megabytes).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch

from baton_kernels.cpu.library import library

#: Bytes per vector that the kernel copies.
_STRIPE_BYTES = 64

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class KvRangeCall(ctypes.Structure):
    """`KvRange` of calls.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("pool", "block_ids")),
        *((name, _LONG) for name in ("block_bytes", "num_heads", "head_bytes")),
        *((name, _LONG) for name in ("row_bytes", "block_size", "first_token", "num_tokens")),
    )


def checked_copy_of(
    pool: torch.Tensor, row_bytes: int, block_size: int
) -> NativeCheckedCopy | None:
    """Checked copy for a pool [blocks, layers, parts, kv_heads, head_bytes] uint8 in host memory.
    head_bytes holds block_size rows and data of the whole block. None without the native library,
    or for blocks that it cannot copy."""
    native = library()
    layer_bytes = pool[0, 0].nbytes
    if native is None or layer_bytes % _STRIPE_BYTES or pool.data_ptr() % _STRIPE_BYTES:
        return None
    return NativeCheckedCopy(native, pool, row_bytes, block_size)


class NativeCheckedCopy:
    """Copies between blocks and payloads. Ranges are not checked here. Thread-safe for distinct
    blocks; the GIL is released while copying."""

    def __init__(
        self, native: ctypes.CDLL, pool: torch.Tensor, row_bytes: int, block_size: int
    ) -> None:
        """See checked_copy_of."""
        self._native = native
        self._pool = pool
        self._address = pool.data_ptr()
        self._block_bytes = pool[0].nbytes
        self._layer_bytes = pool[0, 0].nbytes
        self._layer_heads = pool[0, 0, ..., 0].numel()
        self._head_bytes = pool.shape[-1]
        self._row_bytes = row_bytes
        self._block_size = block_size
        has_rows_only = self._head_bytes == block_size * row_bytes
        #: Whether a part of a block's rows can be copied.
        self.copies_rows = has_rows_only and not row_bytes % _STRIPE_BYTES
        #: Minimum payload length: xxh3 hashes shorter ones differently.
        self.min_bytes = 241

    def gather(
        self,
        block_ids: Sequence[int],
        tokens: tuple[int, int],
        layers: tuple[int, int],
        packed: memoryview,
        seed: int,
    ) -> int:
        """Fill `packed` with the rows of a range, one block after the other, each [layers, parts,
        kv_heads, tokens], and return its xxh3_64.

        tokens: (first, count), counted from the first block's beginning; whole blocks unless
        `copies_rows`. layers: (first, count).
        """
        return self._call(
            self._native.baton_checked_gather, block_ids, tokens, layers, packed, seed
        )

    def scatter(
        self,
        block_ids: Sequence[int],
        tokens: tuple[int, int],
        layers: tuple[int, int],
        packed: memoryview,
        seed: int,
    ) -> int:
        """Inverse of gather. Returns the xxh3_64 of the bytes written."""
        return self._call(
            self._native.baton_checked_scatter, block_ids, tokens, layers, packed, seed
        )

    def _call(
        self,
        function: Callable[..., None],
        block_ids: Sequence[int],
        tokens: tuple[int, int],
        layers: tuple[int, int],
        packed: memoryview,
        seed: int,
    ) -> int:
        (first_token, num_tokens), (first_layer, num_layers) = tokens, layers
        num_bytes = num_layers * self._layer_bytes * num_tokens // self._block_size
        if packed.nbytes != num_bytes:
            raise ValueError(
                f"{packed.nbytes} bytes for {num_tokens} tokens of {num_layers} layers"
            )
        ids = (_LONG * len(block_ids))(*block_ids)
        call = KvRangeCall(
            self._address + first_layer * self._layer_bytes,
            ctypes.addressof(ids),
            self._block_bytes,
            num_layers * self._layer_heads,
            self._head_bytes,
            self._row_bytes,
            self._block_size,
            first_token,
            num_tokens,
        )
        checksum = ctypes.c_uint64()
        function(
            ctypes.byref(call),
            np.frombuffer(packed, np.uint8).ctypes.data,
            num_bytes,
            seed,
            ctypes.byref(checksum),
        )
        return checksum.value
