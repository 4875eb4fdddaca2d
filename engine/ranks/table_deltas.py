"""Block tables of successive steps as differences, so that a step's message does not grow with its
sequences.

Both ends keep the tables that were sent last, by number. A table is sent as the number of an
earlier one, how many of its ids are kept, those that changed within these, and those appended. The
sender finds the earlier table by a block that both have: it knows nothing of sequences, so that
forks, beams and new owners of freed blocks need no care. It also chooses which tables are
forgotten.

All numbers are int64. Of a step: number of forgotten tables, these; number of tables, and of each

    target, base, num_kept, num_changed, num_appended, changed positions, changed ids, appended ids

base is -1 for no earlier table. The result is kept as `target`, which may be `base`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Ids = NDArray[np.int64]
_NONE = -1
_NO_IDS: _Ids = np.empty(0, np.int64)
#: Numbers of a table before its ids.
_NUM_HEADER = 5
#: Ids of all tables that are kept, of 8 bytes each; tables of the running step come on top.
_MAX_IDS = 1 << 20


class TableEncoder:
    """Rank 0's end."""

    def __init__(self, max_ids: int = _MAX_IDS) -> None:
        self._max_ids = max_ids
        self._tables: OrderedDict[int, list[int]] = OrderedDict()
        """By number, the least recently used first."""
        self._num_ids = 0
        self._free: list[int] = []
        self._with_block: dict[int, int] = {}
        """Number of the table that a block was last appended to; it may be forgotten since."""

    def encode(self, tables: Sequence[Sequence[int]]) -> array[int]:
        """The numbers of a step with these tables."""
        used: set[int] = set()
        parts = array("q")
        for table in tables:
            self._encode(list(table), used, parts)
        forgotten = self._forget(used)
        return array("q", [len(forgotten), *forgotten, len(tables)]) + parts

    def _encode(self, table: list[int], used: set[int], out: array[int]) -> None:
        base = self._find(table)
        old = self._tables.get(base, [])
        num_kept = min(len(old), len(table))
        changed: list[int] = []
        if old[:num_kept] != table[:num_kept]:
            changed = [at for at in range(num_kept) if old[at] != table[at]]
            if 2 * len(changed) > num_kept:
                base, old, num_kept, changed = _NONE, [], 0, []
        # A table that loses ids, or two that follow one, are branches: the other goes on from base.
        goes_on = base != _NONE and num_kept == len(old) and base not in used
        target = base if goes_on else self._new_number()
        new_ids, appended = [table[at] for at in changed], table[num_kept:]
        self._keep(target, table, (*new_ids, *appended, *table[-1:]))
        used.add(target)
        out.extend((target, base, num_kept, len(changed), len(appended)))
        out.extend((*changed, *new_ids, *appended))

    def _find(self, table: list[int]) -> int:
        """The table with the last block that is known; _NONE without."""
        for block_id in reversed(table):
            number = self._with_block.get(block_id, _NONE)
            if number in self._tables:
                return number
        return _NONE

    def _keep(self, number: int, table: list[int], own: Sequence[int]) -> None:
        """own: ids by which the table is found."""
        self._num_ids += _cost(table) - _cost(self._tables.get(number))
        self._tables[number] = table
        self._tables.move_to_end(number)
        self._with_block.update(dict.fromkeys(own, number))

    def _new_number(self) -> int:
        return self._free.pop() if self._free else len(self._tables)

    def _forget(self, used: set[int]) -> list[int]:
        """Forget what was not used for longest, within the limit. Returns the numbers."""
        forgotten = []
        while self._num_ids > self._max_ids and (oldest := next(iter(self._tables))) not in used:
            self._num_ids -= _cost(self._tables.pop(oldest))
            forgotten.append(oldest)
        self._free += forgotten
        return forgotten


def _cost(table: list[int] | None) -> int:
    """What a kept table counts towards the limit; an empty one, too."""
    return 0 if table is None else len(table) + 1


class TableDecoder:
    """The end of another rank."""

    def __init__(self) -> None:
        self._tables: dict[int, _Ids] = {}

    def decode(self, numbers: _Ids) -> tuple[list[array[int]], int]:
        """The tables of a step, and how many of `numbers` they took."""
        num_forgotten = int(numbers[0])
        forgotten, at = numbers[1 : 1 + num_forgotten], num_forgotten + 2
        tables = []
        for _ in range(int(numbers[num_forgotten + 1])):
            table, at = self._decode(numbers, at)
            tables.append(array("q", table.tobytes()))
        for number in forgotten.tolist():
            del self._tables[number]
        return tables, at

    def _decode(self, numbers: _Ids, at: int) -> tuple[_Ids, int]:
        target, base, num_kept, num_changed, num_appended = numbers[at : at + _NUM_HEADER].tolist()
        at += _NUM_HEADER
        changed, ids, appended, _ = np.split(
            numbers[at:], np.cumsum((num_changed, num_changed, num_appended))
        )
        kept = self._tables.get(base, _NO_IDS)[:num_kept]
        table = np.concatenate((kept, appended))
        table[changed] = ids
        self._tables[target] = table
        return table, at + 2 * num_changed + num_appended
