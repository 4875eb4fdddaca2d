"""Packs, unpacks, converts and sums payloads of the KV channel on the device of the blocks; without
conversion in one pass over the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.types import SCALED_DTYPES, KvLayout
from baton_kernels.host_copy import HostCopy
from baton_kernels.kv_convert import DTYPES, Conversion, kv_decode, kv_encode
from baton_kernels.kv_pack import Runs, kv_pack_summed, kv_unpack_summed
from baton_kernels.word_sum import WORD_BYTES, checksum_of, host_checksum, key_of, word_sum
from engine.kv.layout import groups_of
from engine.kv.range import ALL, KvRange
from engine.kv.tensors.copy_order import CopyOrder
from engine.kv.tensors.packed import check_range
from engine.kv.tensors.pinned_staging import PinnedStagingBuffer


class SharedArea(Protocol):
    """See kv_transfer.device_memory.DeviceArea."""

    @property
    def handle(self) -> bytes: ...

    @property
    def address(self) -> int: ...

    def part(self, start: int, num_bytes: int) -> torch.Tensor: ...

    def close(self) -> None: ...


class SharedMemory(Protocol):
    """See kv_transfer.device_memory.DeviceMemory."""

    @property
    def device_number(self) -> int: ...

    def allocate(self, num_bytes: int) -> SharedArea: ...

    def open(self, handle: bytes, num_bytes: int) -> SharedArea: ...


class PayloadFormat(Protocol):
    """See kv_transfer.wire_format.WireFormat."""

    @property
    def dtype(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    @property
    def has_row_scales(self) -> bool: ...

    def is_that_of(self, dtype: str) -> bool: ...

    def num_bytes(self, piece: KvRange) -> int: ...


#: Maximum elements of a head's run to convert at once; the host converts longer ones.
_MAX_RUN_ELEMENTS = 1 << 14


class PagedDeviceCopy:
    """See kv_transfer.device_memory.DeviceCopy. Payloads are uint8 [bytes], contiguous, aligned to
    8 bytes. Thread-safe for distinct blocks.

    A row of a plain pool is one token's head, [head_dim] elements. A row of a pool with scales is
    one block's head, codes and scales, which are contiguous per block.
    """

    def __init__(
        self, layout: KvLayout, blocks: torch.Tensor, order: CopyOrder, memory: SharedMemory
    ) -> None:
        """blocks: [blocks, layers, parts, kv_heads, bytes of a block's head] uint8, the pool's
        memory. memory: of the same device."""
        self.memory = memory
        self._layout = layout
        self._groups = groups_of(layout)
        self._order = order
        self._pinned = PinnedStagingBuffer(blocks.device)
        self._blocks = blocks
        self._num_blocks = len(blocks)
        self._row_tokens = layout.block_size if layout.dtype in SCALED_DTYPES else 1
        rows = blocks.unflatten(-1, (layout.block_size // self._row_tokens, -1))  # type: ignore[no-untyped-call]
        # Words, if each row [..., bytes] begins and ends at a word boundary.
        is_aligned = not any(count % WORD_BYTES for count in (rows.shape[-1], rows.data_ptr()))
        self._rows = rows.view(torch.int64) if is_aligned else None

    def fits(self, piece: KvRange, wire: PayloadFormat) -> bool:
        """Whether payloads of that range can be packed and unpacked here."""
        if wire.num_bytes(piece) % WORD_BYTES or piece.group != ALL:
            return False
        if not wire.is_that_of(self._layout.dtype):
            return self._converts(wire)
        tokens = (piece.first_token, piece.num_tokens, wire.block_size)
        is_of_rows = not any(count % self._row_tokens for count in tokens)
        # With scales, a payload of several blocks has all codes before all scales.
        is_block = self._row_tokens in (1, wire.block_size)
        return self._rows is not None and is_of_rows and is_block

    def _converts(self, wire: PayloadFormat) -> bool:
        """Whether it converts KV to and from the payload's type. One program holds a whole row."""
        is_known = wire.dtype in DTYPES and self._layout.dtype in DTYPES
        places = 1 << (wire.block_size - 1).bit_length() + (self._layout.head_dim - 1).bit_length()
        return is_known and places <= _MAX_RUN_ELEMENTS

    def pack(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        wire: PayloadFormat,
        payload: torch.Tensor,
        seed: int,
    ) -> int:
        """Fill `payload`; returns its word_sum. Raises ValueError as KvPool.pack does, or if the
        payload does not fit."""
        self._check(block_ids, piece, wire, payload.nbytes)
        with self._order.copying():
            total = HostCopy(self._pack(block_ids, piece, wire, payload, key_of(seed)))
        return checksum_of(int(total.wait()), payload.nbytes)

    def unpack(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        wire: PayloadFormat,
        payload: torch.Tensor,
        seed: int,
    ) -> int:
        """Write `payload` into the blocks; returns the word_sum of the bytes written. Raises as
        pack does."""
        self._check(block_ids, piece, wire, payload.nbytes)
        with self._order.copying():
            total = HostCopy(self._unpack(block_ids, piece, wire, payload, key_of(seed)))
        return checksum_of(int(total.wait()), payload.nbytes)

    def pack_to_host(
        self, block_ids: Sequence[int], piece: KvRange, wire: PayloadFormat, data: memoryview
    ) -> None:
        """Fill `data`, in host memory, from the blocks. Raises as pack does."""
        self._check(block_ids, piece, wire, data.nbytes)
        with self._order.copying():
            payload = self._pinned.staging(data.nbytes)
            self._pack(block_ids, piece, wire, payload, 0)
            self._pinned.to_host(payload, data)

    def unpack_from_host(
        self, block_ids: Sequence[int], piece: KvRange, wire: PayloadFormat, data: memoryview
    ) -> None:
        """Write `data`, in host memory, into the blocks. Raises as pack does."""
        self._check(block_ids, piece, wire, data.nbytes)
        with self._order.copying():
            payload = self._pinned.staging(data.nbytes)
            self._pinned.to_device(data, payload)
            self._unpack(block_ids, piece, wire, payload, 0)

    def put(self, data: memoryview, payload: torch.Tensor, seed: int) -> int:
        """Copy `data` from the host to `payload`; returns its word_sum."""
        host = torch.frombuffer(data, dtype=torch.uint8)
        with self._order.copying():
            self._pinned.to_device(data, payload)
        return host_checksum(host, seed)

    def take(self, payload: torch.Tensor, data: memoryview, seed: int) -> int:
        """Copy `payload` to the host; returns the word_sum of the bytes that arrived."""
        host = torch.frombuffer(data, dtype=torch.uint8)
        with self._order.copying():
            self._pinned.to_host(payload, data)
        return host_checksum(host, seed)

    def _pack(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        wire: PayloadFormat,
        payload: torch.Tensor,
        key: int,
    ) -> torch.Tensor:
        """Sum over the payload's words, on the device."""
        words = payload.view(torch.int64)
        if wire.is_that_of(self._layout.dtype) and self._rows is not None:
            return kv_pack_summed(self._rows, block_ids, self._row_runs(piece, wire), words, key)
        runs = _runs(piece, wire.block_size)
        kv_encode(self._blocks, block_ids, runs, self._conversion(wire), payload)
        return word_sum(words, key)

    def _unpack(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        wire: PayloadFormat,
        payload: torch.Tensor,
        key: int,
    ) -> torch.Tensor:
        """Sum over the words written, on the device."""
        if wire.is_that_of(self._layout.dtype) and self._rows is not None:
            words = payload.view(torch.int64)
            return kv_unpack_summed(self._rows, block_ids, self._row_runs(piece, wire), words, key)
        # The payload's owner might write to it between the sum and the conversion.
        taken = payload.clone()
        kv_decode(
            self._blocks, block_ids, _runs(piece, wire.block_size), self._conversion(wire), taken
        )
        return word_sum(taken.view(torch.int64), key)

    def _conversion(self, wire: PayloadFormat) -> Conversion:
        layout = self._layout
        return Conversion(layout.dtype, wire.dtype, wire.has_row_scales, layout.head_dim)

    def _check(
        self, block_ids: Sequence[int], piece: KvRange, wire: PayloadFormat, num_bytes: int
    ) -> None:
        check_range(self._groups, self._num_blocks, block_ids, piece)
        if not self.fits(piece, wire):
            raise ValueError(f"{piece} in runs of {wire.block_size} tokens is not of whole words")
        if num_bytes != wire.num_bytes(piece):
            raise ValueError(f"{num_bytes} bytes do not hold {piece}")

    def _row_runs(self, piece: KvRange, wire: PayloadFormat) -> Runs:
        """Runs of a piece, in rows instead of tokens."""
        each = self._row_tokens
        return Runs(
            piece.first_token // each,
            piece.num_tokens // each,
            piece.first_layer,
            piece.num_layers,
            wire.block_size // each,
        )


def _runs(piece: KvRange, run_tokens: int) -> Runs:
    return Runs(
        piece.first_token, piece.num_tokens, piece.first_layer, piece.num_layers, run_tokens
    )
