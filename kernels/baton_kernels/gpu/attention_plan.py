"""Splits a step's attention into work items for programs: on the host, once per step and window.
See paged_attention."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
import triton

from baton_kernels.host_copy import to_device
from baton_kernels.paged_attention import AttentionSlice, PlacedTables

#: Rows (tokens * heads that share a KV head) of the largest tile.
MAX_ROWS = 128
#: Keys per item of a sequence with few new rows, and the maximum number of these rows.
SPLIT_TOKENS = 512
MAX_SPLIT_ROWS = 64
#: The same for sequences with more rows: keys per item for each tile of the sequence, rounded up to
#: a power of two, so that partial results do not grow with rows; and the maximum number of tiles.
#: Sequences with more tiles give enough programs, so their keys are not split.
LONG_SPLIT_TOKENS = 2048
MAX_SPLIT_TILES = 8
#: Rows of the largest tile over a pool of one part: with 512 sums per row, 64 rows would spill
#: registers. Also the maximum number of heads per block.
MAX_LATENT_ROWS = 32
#: Rows of the tile used for all sequences; and a number of keys that no sequence reaches.
_FIXED_ROWS = 64
_UNSPLIT = 1 << 30
#: int32 fields of an item: first row of the batch, number of tokens, position of the first, first
#: entry of the block table, first key, end of the keys, index of the partial result or -1.
ITEM_FIELDS = 7
#: int32 fields of a merge: row of the batch, index of the token in its tile, first partial result,
#: number of partial results.
MERGE_FIELDS = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of BLOCK_M rows by block_n keys, and its compile options. block_n divides
    SPLIT_TOKENS. is_fixed: used for all sequences, without splitting keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    is_fixed: bool = False

    @property
    def split_tokens(self) -> int:
        """Keys per item of a sequence with one new token."""
        return _UNSPLIT if self.is_fixed else SPLIT_TOKENS


def head_blocks(pool: torch.Tensor, num_heads: int) -> int:
    """Number of blocks of heads; all blocks have equally many heads, and a program runs one. Heads
    that share a KV head form a block. In a pool of one part, all heads share one row: the fewest
    blocks with at most MAX_LATENT_ROWS heads each."""
    num_kv_heads = pool.shape[3]
    if pool.shape[2] == 2:
        return num_kv_heads
    blocks = range(-(-num_heads // MAX_LATENT_ROWS), num_heads + 1)
    return next(count for count in blocks if num_heads % count == 0)


def choose_tile(num_rows: int, pool: torch.Tensor, dtype: torch.dtype) -> Tile:
    """The largest tile for `num_rows` new rows of `dtype` that fits shared memory and registers
    without spilling.

    float32 fits less, because its products do not run on tensor cores; so do 8-bit codes, which are
    widened first.
    """
    size = 4 if dtype == torch.float32 else pool.element_size()
    if pool.shape[2] == 1:
        return _latent_tile(num_rows, size)
    dim = triton.next_power_of_2(pool.shape[5])
    widest = {1: 64, 2: max(16, min(MAX_ROWS, 16384 // dim)), 4: 16}[size]
    block_m = min(widest, max(16, triton.next_power_of_2(num_rows)))
    block_n = max(16, min(128, (4096 if size == 4 else 8192) // dim))
    return Tile(block_m, block_n, 8 if block_m > 64 or block_m * dim > 8192 else 4, 3)


def _latent_tile(num_rows: int, size: int) -> Tile:
    """The tile for a pool of one part: keys are loaded once and are values, too. size: bytes per
    element of the operands, or of codes."""
    block_m = min(MAX_LATENT_ROWS, max(16, triton.next_power_of_2(num_rows)))
    return Tile(block_m, 16 if size == 4 else 32, 8, 3)


def fixed_tile(_num_rows: int, pool: torch.Tensor, dtype: torch.dtype) -> Tile:
    """One tile for any number of new rows: a row's bits depend neither on the batch nor on the
    chunk in which it is computed."""
    return replace(choose_tile(_FIXED_ROWS, pool, dtype), is_fixed=True)


@dataclass(frozen=True, slots=True)
class Launch:
    """Items of one tile size.

    items [items, ITEM_FIELDS] int32; merges [merges, MERGE_FIELDS] int32; part [parts, blocks of
    heads, block_m, head_dim] and lse [parts, blocks of heads, block_m] float32, scratch memory of
    one call, shared by layers. Blocks of heads: see head_blocks.
    """

    tile: Tile
    items: torch.Tensor
    merges: torch.Tensor
    part: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Plan of one step, shared by the layers with one window. table: all block tables,
    concatenated, int32."""

    scale: float
    window: int | None
    table: torch.Tensor
    launches: tuple[Launch, ...]


def list_items(
    slices: Sequence[AttentionSlice],
    pool: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int | None,
    dtype: torch.dtype | None = None,
    placed: PlacedTables | None = None,
    *,
    choose: Callable[[int, torch.Tensor, torch.dtype], Tile] = choose_tile,
) -> AttentionPlan:
    """plan_attention with all items listed by the host: see the twin. Items and the tables that are
    not `placed` go to the device in one copy.

    choose: returns the tile for a number of rows. Raises ValueError if more heads share a KV head
    than a tile has rows.
    """
    num_blocks, head_dim = head_blocks(pool, num_heads), pool.shape[5]
    group = num_heads // num_blocks
    lists: dict[Tile, WorkList] = {}
    numbers = array("q")
    if placed is None:
        begins: Sequence[int] = [0, *accumulate(len(part.block_table) for part in slices)]
        for part in slices:
            # The engine's tables have the same type and are copied without conversion.
            numbers.extend(part.block_table)
    else:
        begins = placed.begins
    for part, begin in zip(slices, begins, strict=False):
        tile = choose(part.num_tokens * group, pool, dtype or pool.dtype)
        work = lists.setdefault(tile, WorkList(tile, group, window))
        work.add(part, begin)
    num_entries = len(numbers)
    for work in lists.values():
        numbers.extend(chain.from_iterable(work.ordered()))
        numbers.extend(chain.from_iterable(work.merges))
    on_device = to_device(torch.frombuffer(numbers, dtype=torch.int64).to(torch.int32), pool.device)
    launches = []
    first = num_entries
    for tile, work in lists.items():
        end_items = first + len(work.items) * ITEM_FIELDS
        end = end_items + len(work.merges) * MERGE_FIELDS
        shape = (work.num_parts, num_blocks, tile.block_m)
        launches.append(
            Launch(
                tile,
                on_device[first:end_items].view(-1, ITEM_FIELDS),
                on_device[end_items:end].view(-1, MERGE_FIELDS),
                torch.empty(*shape, head_dim, dtype=torch.float32, device=pool.device),
                torch.empty(shape, dtype=torch.float32, device=pool.device),
            )
        )
        first = end
    table = on_device[:num_entries] if placed is None else placed.entries
    return AttentionPlan(scale, window, table, tuple(launches))


def num_items(position: int, window: int | None, tile: Tile) -> int:
    """Items of one new token at `position`."""
    low = 0 if window is None else max(0, position - window + 1)
    return position // tile.split_tokens - low // tile.split_tokens + 1


def most_items(num_tokens: int, window: int | None, tile: Tile) -> int:
    """Maximum number of items of one new token in sequences of up to `num_tokens` tokens."""
    split = tile.split_tokens
    reach = num_tokens if window is None else min(num_tokens, window + split - 1)
    return -(-reach // split)


class WorkList:
    """Items and merges of one tile size, while a plan is built."""

    def __init__(self, tile: Tile, group: int, window: int | None) -> None:
        """group: heads per block, see head_blocks. Raises ValueError if a tile has fewer rows."""
        if group > tile.block_m:
            raise ValueError(f"{group} heads share a KV head; at most {tile.block_m} can")
        self._tokens_per_tile = tile.block_m // group
        self._max_split_tokens = MAX_SPLIT_ROWS // group
        self._is_fixed = tile.is_fixed
        self._block_n = tile.block_n
        self._window = window
        self.items: list[tuple[int, ...]] = []
        self.merges: list[tuple[int, ...]] = []
        self.num_parts = 0

    def add(self, part: AttentionSlice, first_entry: int) -> None:
        """Split a sequence into items. first_entry: start of its block table in the plan's
        table."""
        split = self._split(part.num_tokens)
        for offset in range(0, part.num_tokens, self._tokens_per_tile):
            count = min(self._tokens_per_tile, part.num_tokens - offset)
            position = part.start + offset
            step = position + count if split is None else split
            self._add_tile(part.first_row + offset, count, position, first_entry, step)

    def _split(self, num_tokens: int) -> int | None:
        """Keys per item of a sequence, None if its keys are not split. Depends on its number of new
        tokens alone, so that a row does not depend on the batch."""
        if self._is_fixed:
            return None
        if num_tokens <= self._max_split_tokens:
            return SPLIT_TOKENS
        num_tiles = -(-num_tokens // self._tokens_per_tile)
        if num_tiles > MAX_SPLIT_TILES:
            return None
        return LONG_SPLIT_TOKENS * int(triton.next_power_of_2(num_tiles))

    def _add_tile(
        self, first_row: int, count: int, position: int, first_entry: int, step: int
    ) -> None:
        end = position + count
        low = 0 if self._window is None else max(0, position - self._window + 1)
        begins = range(low // step * step, end, step)
        parts = [-1] if len(begins) == 1 else range(self.num_parts, self.num_parts + len(begins))
        for begin, index in zip(begins, parts, strict=True):
            first_key = max(begin, low // self._block_n * self._block_n)
            keys = (first_key, min(begin + step, end))
            self.items.append((first_row, count, position, first_entry, *keys, index))
        if len(begins) > 1:
            of_tile = (self.num_parts, len(begins))
            self.merges += [(first_row + token, token, *of_tile) for token in range(count)]
            self.num_parts += len(begins)

    def ordered(self) -> list[tuple[int, ...]]:
        """Items, longest key range first, so that the last programs to start are short."""
        return sorted(self.items, key=lambda item: item[4] - item[5])
