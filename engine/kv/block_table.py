"""The block table of a sequence, in a form that engines copy from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    _Numbers = array[int]
else:
    # Python 3.11 cannot subscript array.
    _Numbers = array


class BlockTable(_Numbers):
    """Block ids of a sequence, in order, as 64-bit integers.

    num_blocks: size of the pool; each id is in [0, num_blocks). num_rewrites: number of replaced
    entries. Otherwise the table only grows at its end: a copy of its first n entries is valid as
    long as num_rewrites is unchanged.
    """

    __slots__ = ("num_blocks", "num_rewrites")

    num_blocks: int
    num_rewrites: int

    def __new__(cls, block_ids: Iterable[int], num_blocks: int) -> BlockTable:
        """block_ids: blocks of a pool of num_blocks, owned by the caller."""
        table = cast(BlockTable, super().__new__(cls, "q", block_ids))
        table.num_blocks = num_blocks
        table.num_rewrites = 0
        return table

    def replace(self, index: int, block_id: int) -> None:
        """Replace the block at one index."""
        self[index] = block_id
        self.num_rewrites += 1
