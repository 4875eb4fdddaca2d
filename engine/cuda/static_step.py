"""The metadata of decode steps at addresses that never change, for graphs to read: filled anew for
each step by one copy."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from itertools import chain
from typing import cast

import torch

from baton_kernels.gpu.attention_plan import AttentionPlan, Tile, num_items
from baton_kernels.gpu.padded_plan import (
    PlanRoom,
    Sequences,
    empty_partials,
    padded_plan,
    plan_items,
)
from baton_kernels.kv_write import block_rows
from baton_kernels.paged_attention import AttentionPlan as TwinPlan
from engine.cuda.graph_device import GraphDevice
from engine.cuda.step_shapes import StepShape
from engine.interface import Batch, SequenceSlice
from engine.torch.decoder import PackedBatch
from engine.torch.device_tables import DeviceTables
from engine.torch.step_runner import StepModel

#: int64 numbers of each sequence: its new token, its position, its row of the pool
#: (PackedBatch.first_rows), the length that its frequencies are for, and where its block table
#: begins.
_NUM_ROWS = 5


class StaticStep:
    """One buffer on the device, which all shapes share, each with a layout of its own, and two on
    the host to fill it from: one may still be read by a copy that waits for its turn on the stream.

    Layout: _NUM_ROWS rows of num_seqs int64. What attention has to do is found from them by the
    device, and block tables stay there: the host's work does not grow with contexts.
    """

    def __init__(
        self,
        model: StepModel,
        tile: Tile,
        largest: StepShape,
        tables: DeviceTables,
        device: GraphDevice,
    ) -> None:
        """tile: of a sequence with one new token. largest: as many sequences, items and merges as
        any shape has. tables: with a row for each of as many sequences."""
        self._model = model
        self._tile = tile
        self.windows = sorted(set(model.config.windows), key=lambda window: window or 0)
        self._device = device
        pool = model.kv.tensor
        self._partials = empty_partials(largest.num_items, pool, tile, model.config.num_heads)
        self._tables = tables
        num_numbers = _NUM_ROWS * largest.num_seqs
        self._buffer = torch.zeros(num_numbers, dtype=torch.int64, device=pool.device)
        fields = len(self.windows) * _room(largest).num_fields
        self._fields = torch.zeros(fields, dtype=torch.int32, device=pool.device)
        self._hosts = [_HostBuffer(device.host_buffer(2 * num_numbers)) for _ in range(2)]

    def num_items(self, batch: Batch) -> int:
        """Of attention, in the window that has most, in a batch of one new token each."""
        tile, parts = self._tile, batch.slices
        return max(sum(num_items(part.start, w, tile) for part in parts) for w in self.windows)

    def fill(self, shape: StepShape, batch: Batch) -> None:
        """Queue the copy of a step's metadata, padded to `shape`, which holds it, behind what the
        device was given so far."""
        begins = self._tables.place([part.block_table for part in batch.slices])
        pool = self._model.kv.tensor
        num_rows = block_rows(pool)
        columns = [
            _column(part, begin, pool.shape[4], num_rows)
            for part, begin in zip(batch.slices, begins, strict=True)
        ]
        # Those that only fill the batch up have a row before all blocks, which is written nowhere.
        columns += [(0, 0, -num_rows, 1, 0)] * (shape.num_seqs - len(columns))
        numbers = array("q", chain.from_iterable(zip(*columns, strict=True)))
        self._hosts.reverse()
        host = self._hosts[0]
        host.wait()
        words = host.words[: 2 * len(numbers)].view(torch.int64)
        words.copy_(torch.frombuffer(numbers, dtype=torch.int64))
        self._buffer[: len(numbers)].copy_(words, non_blocking=True)
        host.wait = self._device.fence()

    def token_ids(self, shape: StepShape) -> torch.Tensor:
        """Where the step's new tokens are, [num_seqs] int64, in the buffer."""
        return self._buffer[: shape.num_seqs]

    def packed(self, shape: StepShape) -> PackedBatch:
        """The batch that is in the buffer, in tensors that the device computes from it whenever it
        does what this call had it do."""
        model = self._model
        rows = self._buffer[: _NUM_ROWS * shape.num_seqs].view(_NUM_ROWS, shape.num_seqs)
        token_ids, positions, first_rows, lengths, begins = rows
        rotations = model.rope.compute(positions, lengths, model.decoder.dtype)
        # A row counts heads of all blocks, which may be more than 32 bits hold: its sign is enough.
        narrow = (positions, first_rows.sign(), begins)
        sequences = Sequences(*(row.to(torch.int32) for row in narrow))
        room = _room(shape)
        plans: dict[int | None, AttentionPlan] = {}
        for index, window in enumerate(self.windows):
            at = index * room.num_fields
            plan = plans[window] = padded_plan(
                self._fields[at : at + room.num_fields],
                self._tables.entries,
                room,
                self._tile,
                self._partials,
                model.config.traits.attention_scale,
                window,
            )
            plan_items(sequences, plan)
        # The ops take whatever plan their kernels make: on this device, Triton's.
        by_window = cast(Mapping[int | None, TwinPlan], plans)
        return PackedBatch(token_ids, rotations, first_rows, by_window, None)


def _column(
    part: SequenceSlice, begin: int, block_size: int, num_block_rows: int
) -> tuple[int, ...]:
    """See _NUM_ROWS. num_block_rows: rows of a block."""
    start = part.start
    row = part.block_table[start // block_size] * num_block_rows + start % block_size
    return part.token_ids[0], start, row, max(start + 1, part.num_prompt_tokens), begin


class _HostBuffer:
    """wait: until the last copy from `words` is done."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words
        self.wait: Callable[[], None] = lambda: None


def static_bytes(largest: StepShape, num_windows: int) -> int:
    """What a StaticStep keeps on the device, but for partial results."""
    fields = num_windows * _room(largest).num_fields
    return 4 * (2 * _NUM_ROWS * largest.num_seqs + fields)


def _room(shape: StepShape) -> PlanRoom:
    return PlanRoom(shape.num_items, shape.num_merges)
