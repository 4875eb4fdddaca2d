"""The block table of a sequence, in the form that engines copy from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    _Numbers = array[int]
else:
    # Python 3.11 cannot subscript it.
    _Numbers = array


class BlockTable(_Numbers):
    """Ids of a sequence's blocks, in order, as 8-byte numbers: in the form that engines copy from.
    It grows at its end: whoever holds a copy takes what was added since.

    num_blocks: of the pool that the ids are of: each is in [0, num_blocks). num_rewrites: how often
    an entry was replaced. A copy of the first n entries, taken at the same num_rewrites, is that of
    the first n now.
    """

    __slots__ = ("num_blocks", "num_rewrites")

    num_blocks: int
    num_rewrites: int

    def __new__(cls, block_ids: Iterable[int], num_blocks: int) -> BlockTable:
        """block_ids: of a pool of num_blocks, which the caller has them from."""
        table = cast(BlockTable, super().__new__(cls, "q", block_ids))
        table.num_blocks = num_blocks
        table.num_rewrites = 0
        return table

    def replace(self, index: int, block_id: int) -> None:
        """Put another block in the place of one."""
        self[index] = block_id
        self.num_rewrites += 1
