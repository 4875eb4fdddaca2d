"""Payloads of the KV channel in a device's memory: packed, unpacked and summed by the device, in
one pass over the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.engine.copy_order import CopyOrder
from baton.engine.packed_pool import check_range
from baton.engine.pinned_staging import PinnedStagingBuffer
from baton.types import SCALED_DTYPES, KvLayout, KvRange
from baton_kernels.host_copy import HostCopy
from baton_kernels.kv_pack import Runs, kv_pack_summed, kv_unpack_summed
from baton_kernels.word_sum import WORD_BYTES, checksum_of, host_checksum, key_of


class SharedArea(Protocol):
    """See kv_transfer.device_memory.DeviceArea."""

    @property
    def handle(self) -> bytes: ...

    def part(self, start: int, num_bytes: int) -> torch.Tensor: ...

    def close(self) -> None: ...


class SharedMemory(Protocol):
    """See kv_transfer.device_memory.DeviceMemory."""

    def allocate(self, num_bytes: int) -> SharedArea: ...

    def open(self, handle: bytes, num_bytes: int) -> SharedArea: ...


class DeviceCopy:
    """See kv_transfer.device_memory.DeviceCopy. Payloads are uint8 [bytes], contiguous, at a
    multiple of 8 bytes. Thread-safe for distinct blocks.

    A row of a plain pool is one token's head, [head_dim] elements; a row of one with scales is a
    whole block's head, codes and scales, because there a block is what lies in one piece.
    """

    def __init__(
        self, layout: KvLayout, blocks: torch.Tensor, order: CopyOrder, memory: SharedMemory
    ) -> None:
        """blocks: [blocks, layers, parts, kv_heads, bytes of a block's head] uint8, a pool's own.
        memory: of their device."""
        self.memory = memory
        self._layout = layout
        self._order = order
        self._pinned = PinnedStagingBuffer(blocks.device)
        self._num_blocks = len(blocks)
        self._row_tokens = layout.block_size if layout.dtype in SCALED_DTYPES else 1
        rows = blocks.unflatten(-1, (layout.block_size // self._row_tokens, -1))  # type: ignore[no-untyped-call]
        self._rows = rows.view(torch.int64) if _is_words(rows) else None

    def fits(self, piece: KvRange, run_tokens: int) -> bool:
        """Whether a payload of that range, in runs that end at multiples of run_tokens, can be
        packed and unpacked here."""
        tokens = (piece.first_token, piece.num_tokens, run_tokens)
        is_of_rows = not any(count % self._row_tokens for count in tokens)
        # A run of several blocks with scales has all codes before all scales.
        return self._rows is not None and is_of_rows and self._row_tokens in (1, run_tokens)

    def pack(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        run_tokens: int,
        payload: torch.Tensor,
        seed: int,
    ) -> int:
        """Fill `payload`, and return its word_sum. Raises ValueError as KvPool.pack does, or if it
        does not fit."""
        rows, runs = self._checked(block_ids, piece, run_tokens, payload)
        with self._order.copying():
            words = payload.view(torch.int64)
            total = HostCopy(kv_pack_summed(rows, block_ids, runs, words, key_of(seed)))
        return checksum_of(int(total.wait()), payload.nbytes)

    def unpack(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        run_tokens: int,
        payload: torch.Tensor,
        seed: int,
    ) -> int:
        """Write `payload` into the blocks; the word_sum of the very bytes that were written. Raises
        what pack does."""
        rows, runs = self._checked(block_ids, piece, run_tokens, payload)
        with self._order.copying():
            words = payload.view(torch.int64)
            total = HostCopy(kv_unpack_summed(rows, block_ids, runs, words, key_of(seed)))
        return checksum_of(int(total.wait()), payload.nbytes)

    def pack_to_host(
        self, block_ids: Sequence[int], piece: KvRange, run_tokens: int, data: memoryview
    ) -> None:
        """Fill `data`, in host memory, from the blocks. Raises what pack does."""
        payload = self._pinned.staging(data.nbytes)
        rows, runs = self._checked(block_ids, piece, run_tokens, payload)
        with self._order.copying():
            kv_pack_summed(rows, block_ids, runs, payload.view(torch.int64), 0)
            self._pinned.to_host(payload, data)

    def unpack_from_host(
        self, block_ids: Sequence[int], piece: KvRange, run_tokens: int, data: memoryview
    ) -> None:
        """Write `data`, in host memory, into the blocks. Raises what pack does."""
        payload = self._pinned.staging(data.nbytes)
        rows, runs = self._checked(block_ids, piece, run_tokens, payload)
        with self._order.copying():
            self._pinned.to_device(data, payload)
            kv_unpack_summed(rows, block_ids, runs, payload.view(torch.int64), 0)

    def put(self, data: memoryview, payload: torch.Tensor, seed: int) -> int:
        """Fill `payload` from the host; its word_sum."""
        host = torch.frombuffer(data, dtype=torch.uint8)
        with self._order.copying():
            self._pinned.to_device(data, payload)
        return host_checksum(host, seed)

    def take(self, payload: torch.Tensor, data: memoryview, seed: int) -> int:
        """Copy `payload` to the host; the word_sum of what came there."""
        host = torch.frombuffer(data, dtype=torch.uint8)
        with self._order.copying():
            self._pinned.to_host(payload, data)
        return host_checksum(host, seed)

    def _checked(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        run_tokens: int,
        payload: torch.Tensor,
    ) -> tuple[torch.Tensor, Runs]:
        check_range(self._layout, self._num_blocks, block_ids, piece)
        if self._rows is None or not self.fits(piece, run_tokens):
            raise ValueError(f"{piece} in runs of {run_tokens} tokens is not of whole words")
        if payload.nbytes != piece.num_bytes(self._layout.token_layer_bytes):
            raise ValueError(f"{payload.nbytes} bytes do not hold {piece}")
        each = self._row_tokens
        runs = Runs(
            piece.first_token // each,
            piece.num_tokens // each,
            piece.first_layer,
            piece.num_layers,
            run_tokens // each,
        )
        return self._rows, runs


def _is_words(rows: torch.Tensor) -> bool:
    """Whether each row [..., bytes] begins and ends with a word."""
    return not any(count % WORD_BYTES for count in (rows.shape[-1], rows.data_ptr()))
