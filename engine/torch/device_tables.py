"""Block tables in device memory: a row for each recently run sequence, or for each sequence of a
step. A step sends only the entries that a row lacks."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baton_kernels.host_copy import to_device
from baton_kernels.paged_attention import PlacedTables
from engine.kv.block_table import BlockTable


@dataclass(slots=True)
class _Row:
    """Content of row `index`: the first num_sent entries of `source` at its version num_rewrites.
    Keeps the table alive, so that its id is not reused."""

    index: int
    source: Sequence[int]
    num_rewrites: int = -1
    num_sent: int = 0


def table_width(max_model_len: int, block_size: int) -> int:
    """Blocks of the longest sequence."""
    return -(-max_model_len // block_size)


def table_bytes(num_rows: int, width: int) -> int:
    """Device bytes of DeviceTables."""
    return num_rows * width * 4


class SlotRows:
    """Tables of slots (see GroupedKvPool.slot_table) in device memory: row i has that of a step's
    sequence i. They change as windows slide, so a row is compared with what it holds.

    entries: as in DeviceTables. Used by one thread.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        """num_rows, width: see DeviceTables."""
        self.entries = torch.zeros(num_rows * width, dtype=torch.int32, device=device)
        self._held = np.zeros((num_rows, width), np.int64)

    def place(self, tables: Sequence[Sequence[int]]) -> list[int]:
        """See DeviceTables.place."""
        places: list[NDArray[np.int64]] = []
        width = self._held.shape[1]
        slots: list[NDArray[np.int64]] = []
        for row, (held, table) in enumerate(zip(self._held, tables, strict=False)):
            wanted = np.asarray(table, np.int64)[:width]
            (changed,) = np.nonzero(held[: len(wanted)] != wanted)
            if len(changed):
                held[changed] = wanted[changed]
                places.append(changed + row * width)
                slots.append(wanted[changed])
        if places:
            both = torch.from_numpy(np.concatenate([*places, *slots]))
            at, to = to_device(both, self.entries.device).chunk(2)
            self.entries[at] = to.to(torch.int32)
        return [row * width for row in range(len(tables))]

    def placed(self, tables: Sequence[Sequence[int]]) -> PlacedTables | None:
        """See DeviceTables.placed."""
        if len(tables) > len(self._held):
            return None
        return PlacedTables(self.entries, self.place(tables))


class DeviceTables:
    """entries: [num_rows * width] int32 on the device, width entries per row.

    A BlockTable is sent incrementally as it grows. Other sequences do not track changes, so they
    are sent whole. Used by one thread.
    """

    def __init__(
        self, num_rows: int, width: int, device: torch.device, *, has_slots: bool = False
    ) -> None:
        """num_rows: maximum sequences per step. width: blocks of the longest sequence. has_slots:
        the pool is a GroupedKvPool."""
        self.slots = SlotRows(num_rows, width, device) if has_slots else None
        """Tables of the slots, if the pool has any."""
        self.entries = torch.zeros(num_rows * width, dtype=torch.int32, device=device)
        self.num_rows = num_rows
        self._width = width
        self._free = list(range(num_rows))
        self._rows: OrderedDict[int, _Row] = OrderedDict()
        """By the table's id, least recently used first."""

    def place(self, tables: Sequence[Sequence[int]]) -> list[int]:
        """Start of each table in `entries`, valid for work queued on the device from now on. At
        most num_rows tables, without repeats. Entries past the width are dropped; no step needs
        them."""
        for table in tables:
            if id(table) in self._rows:
                self._rows.move_to_end(id(table))
        places, ids = array("q"), array("q")
        begins = []
        for table in tables:
            row = self._rows.get(id(table)) or self._take(table)
            begin = row.index * self._width
            end = min(len(table), self._width)
            is_grown = isinstance(table, BlockTable) and row.num_rewrites == table.num_rewrites
            first = row.num_sent if is_grown else 0
            if first < end:
                places.extend(range(begin + first, begin + end))
                ids.extend(table[first:end])
                row.num_sent = end
                if isinstance(table, BlockTable):
                    row.num_rewrites = table.num_rewrites
            begins.append(begin)
        if places:
            sent = to_device(torch.frombuffer(places + ids, dtype=torch.int64), self.entries.device)
            self.entries[sent[: len(places)]] = sent[len(places) :].to(torch.int32)
        return begins

    def placed(self, tables: Sequence[Sequence[int]]) -> PlacedTables | None:
        """The tables of a step with their places; None if there are more tables than rows."""
        if len(tables) > self.num_rows:
            return None
        return PlacedTables(self.entries, self.place(tables))

    def _take(self, table: Sequence[int]) -> _Row:
        """Assign a row to a table: a free one, or the least recently used one. With at most
        num_rows tables per step, that row is not of this step."""
        index = self._free.pop() if self._free else self._rows.popitem(last=False)[1].index
        row = self._rows[id(table)] = _Row(index, table)
        return row
