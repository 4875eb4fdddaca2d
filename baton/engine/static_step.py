"""The metadata of decode steps at addresses that never change, for graphs to read: filled anew for
each step by one copy."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import cast

import torch

from baton.engine.graph_device import GraphDevice
from baton.engine.interface import Batch, SequenceSlice
from baton.engine.step_runner import StepModel
from baton.engine.step_shapes import StepShape
from baton.model.decoder import PackedBatch
from baton_kernels.gpu.attention_plan import AttentionPlan, Tile, WorkList
from baton_kernels.gpu.padded_plan import Partials, PlanRoom, padded_fields, padded_plan
from baton_kernels.kv_write import block_rows
from baton_kernels.paged_attention import AttentionPlan as TwinPlan
from baton_kernels.paged_attention import AttentionSlice

#: int64 numbers of each sequence: its new token, its position, its row of the pool
#: (PackedBatch.first_rows), and the length that its frequencies are for.
_NUM_ROWS = 4
#: int32 numbers in 16 bytes, the alignment of block tables that kernels are compiled for.
_ALIGN = 4


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """What attention has to do in a batch of one new token each. work: by window; tables: of all
    sequences, one after the other."""

    batch: Batch
    work: Mapping[int | None, WorkList]
    tables: array[int]

    @property
    def num_items(self) -> int:
        """Of the window that has most."""
        return max(len(work.items) for work in self.work.values())

    @property
    def num_merges(self) -> int:
        return max(len(work.merges) for work in self.work.values())


class StaticStep:
    """One buffer on the device, which all shapes share, each with a layout of its own, and two on
    the host to fill it from: one may still be read by a copy that waits for its turn on the stream.

    Layout, in int32 words: _NUM_ROWS rows of num_seqs int64; of each window its plan's fields;
    block tables to the end of what is used.
    """

    def __init__(
        self, model: StepModel, tile: Tile, partials: Partials, num_words: int, device: GraphDevice
    ) -> None:
        """tile: of a sequence with one new token. partials: room for all items of any shape.
        num_words: see words_of."""
        self._model = model
        self._tile = tile
        self._partials = partials
        self._windows = sorted(set(model.config.windows), key=lambda window: window or 0)
        self._device = device
        pool = model.kv.tensor
        self._buffer = torch.zeros(num_words, dtype=torch.int32, device=pool.device)
        self._hosts = [_HostBuffer(device.host_buffer(num_words)) for _ in range(2)]

    def cut(self, batch: Batch) -> DecodeWork:
        """What attention has to do in a batch whose sequences have one new token each."""
        config, block_size = self._model.config, self._model.kv.tensor.shape[4]
        group = config.num_heads // config.num_kv_heads
        work = {window: WorkList(self._tile, group, window) for window in self._windows}
        tables = array("i")
        for row, part in enumerate(batch.slices):
            first_entry = len(tables)
            tables.extend(islice(part.block_table, part.start // block_size + 1))
            for one in work.values():
                one.add(AttentionSlice(row, 1, part.start, ()), first_entry)
        return DecodeWork(batch, work, tables)

    def fill(self, shape: StepShape, decode: DecodeWork) -> None:
        """Queue the copy of a step's metadata, padded to `shape`, which holds it, behind what the
        device was given so far."""
        numbers = self._rows(shape, decode.batch)
        at = _fields_at(shape)
        idle_rows = range(len(decode.batch.slices), shape.num_seqs)
        padded = (padded_fields(decode.work[w], _room(shape), idle_rows) for w in self._windows)
        fields = array("i", chain.from_iterable(padded))
        fields.extend([0] * (_table_at(shape, len(self._windows)) - at - len(fields)))
        fields.extend(decode.tables)
        end = at + len(fields)
        self._hosts.reverse()
        host = self._hosts[0]
        host.wait()
        host.words[:at].view(torch.int64).copy_(torch.frombuffer(numbers, dtype=torch.int64))
        host.words[at:end].copy_(torch.frombuffer(fields, dtype=torch.int32))
        self._buffer[:end].copy_(host.words[:end], non_blocking=True)
        host.wait = self._device.fence()

    def _rows(self, shape: StepShape, batch: Batch) -> array[int]:
        """_NUM_ROWS rows of num_seqs. Those that only fill the batch up have a row before all
        blocks, which is written nowhere."""
        pool = self._model.kv.tensor
        num_rows = block_rows(pool)
        columns = [_column(part, pool.shape[4], num_rows) for part in batch.slices]
        columns += [(0, 0, -num_rows, 1)] * (shape.num_seqs - len(columns))
        return array("q", chain.from_iterable(zip(*columns, strict=True)))

    def token_ids(self, shape: StepShape) -> torch.Tensor:
        """Where the step's new tokens are, [num_seqs] int64, in the buffer."""
        return self._buffer[: 2 * shape.num_seqs].view(torch.int64)

    def packed(self, shape: StepShape) -> PackedBatch:
        """The batch that is in the buffer, in tensors that the device computes from it whenever it
        does what this call had it do."""
        model = self._model
        at = _fields_at(shape)
        rows = self._buffer[:at].view(torch.int64).view(_NUM_ROWS, shape.num_seqs)
        token_ids, positions, first_rows, lengths = rows
        rotations = model.rope.compute(positions, lengths, model.decoder.dtype)
        table = self._buffer[_table_at(shape, len(self._windows)) :]
        room = _room(shape)
        plans: dict[int | None, AttentionPlan] = {}
        for window in self._windows:
            plans[window] = padded_plan(
                self._buffer[at : at + room.num_fields],
                table,
                room,
                self._tile,
                self._partials,
                model.config.attention_scale,
                window,
            )
            at += room.num_fields
        # The ops take whatever plan their kernels make: on this device, Triton's.
        by_window = cast(Mapping[int | None, TwinPlan], plans)
        return PackedBatch(token_ids, rotations, first_rows, by_window, None)


def _column(part: SequenceSlice, block_size: int, num_block_rows: int) -> tuple[int, int, int, int]:
    """See _NUM_ROWS. num_block_rows: rows of a block."""
    index, offset = divmod(part.start, block_size)
    row = part.block_table[index] * num_block_rows + offset
    return part.token_ids[0], part.start, row, max(part.start + 1, part.num_prompt_tokens)


class _HostBuffer:
    """wait: until the last copy from `words` is done."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words
        self.wait: Callable[[], None] = lambda: None


def words_of(shape: StepShape, num_windows: int, table_width: int) -> int:
    """int32 words that the metadata of a step takes. table_width: blocks of the longest
    sequence."""
    return _table_at(shape, num_windows) + shape.num_seqs * table_width


def _room(shape: StepShape) -> PlanRoom:
    return PlanRoom(shape.num_items, shape.num_merges)


def _fields_at(shape: StepShape) -> int:
    return 2 * _NUM_ROWS * shape.num_seqs


def _table_at(shape: StepShape, num_windows: int) -> int:
    end = _fields_at(shape) + num_windows * _room(shape).num_fields
    return -(-end // _ALIGN) * _ALIGN
