"""Metadata of decode steps at fixed addresses, for graphs to read; one copy per step fills it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
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
from baton_kernels.paged_attention import PlanKey
from engine.cuda.graph_device import GraphDevice
from engine.cuda.recorded_model import RecordedModel, StaticTokens
from engine.cuda.step_shapes import StepShape
from engine.interface import Batch, SequenceSlice
from engine.torch.decoder import WindowedKv
from engine.torch.device_tables import DeviceTables

#: int64 fields per sequence: new token, position, row in the pool (PackedTokens.first_rows), length
#: that selects its RoPE frequencies, start of its block table.
_NUM_ROWS = 5
#: Further ones if windowed layers have their own pool: row in that, start of the table of slots.
_NUM_SLOT_ROWS = 2
#: Most that a model adds, see RecordedModel.columns.
_MOST_COLUMNS = 2


class StaticStep:
    """One buffer on the device, shared by all shapes, each with its own layout; and two host
    buffers to fill it from, because a queued copy may still read one of them.

    Layout: _NUM_ROWS, and _NUM_SLOT_ROWS and the model's columns, rows of num_seqs int64. Block
    tables stay on the device, and the device computes attention items from these fields, so that
    host time does not grow with context length.
    """

    def __init__(
        self,
        model: RecordedModel,
        tile: Tile,
        largest: StepShape,
        tables: DeviceTables,
        device: GraphDevice,
    ) -> None:
        """tile: for a sequence with one new token. largest: maximum sequences, items and merges of
        all shapes. tables: has a row per sequence."""
        self._model = model
        self._tile = tile
        self._keys = model.sizes.keys
        self._device = device
        pool = model.kv.tensor
        self._partials = empty_partials(largest.num_items, pool, tile, model.sizes.num_heads)
        self._tables = tables
        self._slots = tables.slots
        self._apart = model.windowed(Batch(()))
        self._num_rows = _NUM_ROWS + (_NUM_SLOT_ROWS if self._slots else 0) + model.num_columns
        num_numbers = self._num_rows * largest.num_seqs
        self._buffer = torch.zeros(num_numbers, dtype=torch.int64, device=pool.device)
        fields = len(self._keys) * _room(largest).num_fields
        self._fields = torch.zeros(fields, dtype=torch.int32, device=pool.device)
        self._hosts = [_HostBuffer(device.host_buffer(2 * num_numbers)) for _ in range(2)]

    def has_room(self, batch: Batch) -> bool:
        """Whether each slice has a row of block tables. Candidates of a tree have tables of their
        own, so there may be more slices than sequences."""
        return len(batch.slices) <= self._tables.num_rows

    def num_items(self, batch: Batch) -> int:
        """Attention items of a batch, in the plan with the most."""
        tile = self._tile
        positions = [
            part.start + index for part in batch.slices for index in range(len(part.token_ids))
        ]
        return max(sum(num_items(at, key.window, tile) for at in positions) for key in self._keys)

    def fill(
        self, shape: StepShape, batch: Batch, step_tables: Sequence[Sequence[int]] = ()
    ) -> None:
        """Queue the copy of a step's metadata, padded to `shape`. `shape` must hold the batch: a
        sequence of it for each new token, of which those of one slice share its block table. Each
        sees the KV of those before it, which a layer writes before it attends. step_tables: see
        RecordedModel.begin_step."""
        begins = self._tables.place([part.block_table for part in batch.slices])
        pool = self._model.kv.tensor
        num_rows = block_rows(pool)
        columns = [
            _column(part, index, begin, pool.shape[4], num_rows)
            for part, begin in zip(batch.slices, begins, strict=True)
            for index in range(len(part.token_ids))
        ]
        # Padding sequences have a row before all blocks, which is not written.
        num_padding = shape.num_seqs - len(columns)
        columns += [(0, 0, -num_rows, 1, 0)] * num_padding
        if self._slots is not None and self._apart.pool is not None:
            own_rows = block_rows(self._apart.pool)
            in_slots = [
                (_row(part.start + index, table, pool.shape[4], own_rows), begin)
                for part, table, begin in zip(
                    batch.slices, step_tables, self._slots.place(step_tables), strict=True
                )
                for index in range(len(part.token_ids))
            ]
            in_slots += [(-own_rows, 0)] * num_padding
            columns = [(*column, *more) for column, more in zip(columns, in_slots, strict=True)]
        if self._model.num_columns:
            own = self._model.columns(batch, step_tables, num_padding)
            columns = [(*column, *more) for column, more in zip(columns, own, strict=True)]
        numbers = array("q", chain.from_iterable(zip(*columns, strict=True)))
        self._hosts.reverse()
        host = self._hosts[0]
        host.wait()
        words = host.words[: 2 * len(numbers)].view(torch.int64)
        words.copy_(torch.frombuffer(numbers, dtype=torch.int64))
        self._buffer[: len(numbers)].copy_(words, non_blocking=True)
        host.wait = self._device.fence()

    def token_ids(self, shape: StepShape) -> torch.Tensor:
        """The step's new tokens, [num_seqs] int64, a view of the buffer."""
        return self._buffer[: shape.num_seqs]

    def tokens(self, shape: StepShape) -> StaticTokens:
        """The batch in the buffer, as tensors. Recorded in a graph, they are recomputed from the
        buffer at each replay."""
        rows = self._buffer[: self._num_rows * shape.num_seqs].view(-1, shape.num_seqs)
        token_ids, positions, first_rows, lengths, begins, *others = rows
        # Row numbers may exceed 32 bits; their sign is enough here.
        at, signs = positions.to(torch.int32), first_rows.sign().to(torch.int32)
        entries, sequences = self._tables.entries, Sequences(at, signs, begins.to(torch.int32))
        windows_entries, windows_sequences, windowed = entries, sequences, None
        apart = self._apart
        if self._slots is not None and apart.pool is not None:
            own_rows, own_begins, *others = others
            windowed = WindowedKv(apart.pool, apart.scales, own_rows)
            windows_entries = self._slots.entries
            windows_sequences = Sequences(at, signs, own_begins.to(torch.int32))
        room = _room(shape)
        plans: dict[PlanKey, AttentionPlan] = {}
        for index, key in enumerate(self._keys):
            first = index * room.num_fields
            plan = plans[key] = padded_plan(
                self._fields[first : first + room.num_fields],
                entries if key.window is None else windows_entries,
                room,
                self._tile,
                self._partials,
                key.scale,
                key.window,
            )
            plan_items(sequences if key.window is None else windows_sequences, plan)
        # Each device's ops take the plans of its own kernels; these are Triton's.
        by_key = cast(Mapping[PlanKey, TwinPlan], plans)
        return StaticTokens(token_ids, positions, first_rows, lengths, by_key, windowed, others)


def _column(
    part: SequenceSlice, index: int, begin: int, block_size: int, num_block_rows: int
) -> tuple[int, ...]:
    """See _NUM_ROWS. index: of the new token. num_block_rows: rows of a block."""
    at = part.start + index
    row = _row(at, part.block_table, block_size, num_block_rows)
    return part.token_ids[index], at, row, max(at + 1, part.num_prompt_tokens), begin


def _row(at: int, table: Sequence[int], block_size: int, num_block_rows: int) -> int:
    """The row of a position in the pool of `table`. num_block_rows: rows of a block there."""
    index, offset = divmod(at, block_size)
    return table[index] * num_block_rows + offset


class _HostBuffer:
    """A host buffer. wait: waits until the last copy from `words` is done."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words
        self.wait: Callable[[], None] = lambda: None


def static_bytes(largest: StepShape, num_plans: int) -> int:
    """Device bytes of a StaticStep, without partial results."""
    fields = num_plans * _room(largest).num_fields
    num_rows = _NUM_ROWS + _NUM_SLOT_ROWS + _MOST_COLUMNS
    return 4 * (2 * num_rows * largest.num_seqs + fields)


def _room(shape: StepShape) -> PlanRoom:
    return PlanRoom(shape.num_items, shape.num_merges)
