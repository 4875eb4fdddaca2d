"""Attention plans at fixed addresses, for CUDA graphs: a graph's number of programs is fixed, so a
step's items are padded to it.

An item of zeros has no tokens and a merge of zeros no parts: their programs read and write nothing.
A padding sequence has an item without keys, which writes zeros, so that later layers do not compute
with uninitialised memory. Real items equal those of an eager plan, in the same tiles, so a row's
bits do not depend on the padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.attention_plan import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    AttentionPlan,
    Launch,
    Tile,
    head_blocks,
)


@dataclass(frozen=True, slots=True)
class PlanRoom:
    """Numbers of items and merges of a plan, including padding."""

    num_items: int
    num_merges: int

    @property
    def num_fields(self) -> int:
        """int32 fields of all items and merges."""
        return self.num_items * ITEM_FIELDS + self.num_merges * MERGE_FIELDS


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences with one new token each, [seqs] int32: the token's position, its row in the pool
    (negative for padding sequences), and the start of its block table in the plan's table. rows:
    rows of the batch; defaults to 0, 1, 2, ..."""

    positions: torch.Tensor
    first_rows: torch.Tensor
    begins: torch.Tensor
    rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Partials:
    """Memory for partial results, shared by the plans of all windows and sizes: steps run one at a
    time.

    part [parts, blocks of heads, block_m, head_dim], lse [parts, blocks of heads, block_m],
    float32: see head_blocks.
    """

    part: torch.Tensor
    lse: torch.Tensor


def partial_bytes(pool: torch.Tensor, tile: Tile, num_heads: int) -> int:
    """Bytes of one partial result for `num_heads` heads."""
    return head_blocks(pool, num_heads) * tile.block_m * (pool.shape[5] + 1) * 4


def empty_partials(num_parts: int, pool: torch.Tensor, tile: Tile, num_heads: int) -> Partials:
    """Memory for `num_parts` partial results of `num_heads` heads, on the pool's device."""
    shape = (num_parts, head_blocks(pool, num_heads), tile.block_m)
    part = torch.empty(*shape, pool.shape[5], dtype=torch.float32, device=pool.device)
    return Partials(part, torch.empty(shape, dtype=torch.float32, device=pool.device))


# Sequences are rows of one tensor, and merges follow items in another: how many there are decides
# where in 16 bytes each begins.
@triton.jit(
    do_not_specialize=["num_seqs", "num_items", "window"],
    do_not_specialize_on_alignment=[
        *("positions_ptr", "first_rows_ptr", "begins_ptr", "rows_ptr", "items_ptr", "merges_ptr")
    ],
)
def _plan_items(
    positions_ptr, first_rows_ptr, begins_ptr, rows_ptr, items_ptr, merges_ptr, num_seqs,
    num_items, window,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, SEQS: tl.constexpr, ITEM: tl.constexpr,
    MERGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_MERGES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (num_seqs): each program writes the items and the merge of one sequence. The last item
    of each sequence, which has the fewest keys, comes after all others; zeros follow. SEQS: a power
    of two, at least num_seqs."""
    row = tl.program_id(0)
    seqs = tl.arange(0, SEQS)
    there = seqs < num_seqs
    position = tl.load(positions_ptr + seqs, mask=there, other=0)
    is_real = tl.load(first_rows_ptr + seqs, mask=there, other=-1) >= 0
    begin = tl.maximum(position - window + 1, 0) // SPLIT if HAS_WINDOW else position * 0
    count = tl.where(is_real, position // SPLIT - begin + 1, 1)
    num_full = tl.where(there, count - 1, 0)
    num_parts = tl.where(there & (count > 1), count, 0)
    is_before = seqs < row
    first_item = tl.sum(tl.where(is_before, num_full, 0), 0)
    first_part = tl.sum(tl.where(is_before, num_parts, 0), 0)
    first_last = tl.sum(num_full, 0)

    own = tl.load(positions_ptr + row)
    is_own_real = tl.load(first_rows_ptr + row) >= 0
    entry = tl.load(begins_ptr + row)
    batch_row = row
    if HAS_ROWS:
        batch_row = tl.load(rows_ptr + row)
    low = own * 0
    if HAS_WINDOW:
        low = tl.maximum(own - window + 1, 0)
    own_count = tl.where(is_own_real, own // SPLIT - low // SPLIT + 1, 1)
    low_key = low // BLOCK_N * BLOCK_N
    end = tl.where(is_own_real, own + 1, 0)
    chunk = tl.arange(0, 64)
    for start in range(0, own_count, 64):
        index = start + chunk
        inside = index < own_count
        key = (low // SPLIT + index) * SPLIT
        at = tl.where(index == own_count - 1, first_last + row, first_item + index)
        to = items_ptr + at * ITEM
        tl.store(to, batch_row + index * 0, mask=inside)
        tl.store(to + 1, index * 0 + 1, mask=inside)
        tl.store(to + 2, own + index * 0, mask=inside)
        tl.store(to + 3, entry + index * 0, mask=inside)
        tl.store(to + 4, tl.maximum(key, low_key), mask=inside)
        tl.store(to + 5, tl.minimum(key + SPLIT, end), mask=inside)
        tl.store(to + 6, tl.where(own_count > 1, first_part + index, -1), mask=inside)
    # Padding items of zeros, shared out among all programs.
    zero = tl.zeros([64], dtype=tl.int32)
    num_spare = (num_items - first_last - num_seqs) * ITEM
    spare = items_ptr + (first_last + num_seqs) * ITEM
    for start in range(row * 64, num_spare, num_seqs * 64):
        tl.store(spare + start + chunk, zero, mask=start + chunk < num_spare)
    if HAS_MERGES:
        merge = merges_ptr + row * MERGE
        tl.store(merge, batch_row)
        tl.store(merge + 1, 0)
        tl.store(merge + 2, first_part)
        tl.store(merge + 3, tl.where(own_count > 1, own_count, 0))


def plan_items(sequences: Sequences, plan: AttentionPlan) -> None:
    """Fill the items and merges of a padded plan on the device, so that host time per step does not
    grow with context length. The plan must have room for all."""
    (launch,) = plan.launches
    num_seqs, rows = len(sequences.positions), sequences.rows
    _plan_items[(num_seqs,)](
        sequences.positions, sequences.first_rows, sequences.begins,
        sequences.positions if rows is None else rows, launch.items, launch.merges,
        num_seqs, len(launch.items), plan.window or 0,
        SPLIT=launch.tile.split_tokens, BLOCK_N=launch.tile.block_n,
        SEQS=triton.next_power_of_2(num_seqs), ITEM=ITEM_FIELDS, MERGE=MERGE_FIELDS,
        HAS_WINDOW=plan.window is not None, HAS_MERGES=len(launch.merges) > 0,
        HAS_ROWS=rows is not None, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip


def padded_plan(
    fields: torch.Tensor,
    table: torch.Tensor,
    room: PlanRoom,
    tile: Tile,
    partials: Partials,
    scale: float,
    window: int | None,
) -> AttentionPlan:
    """A plan that reads its items and merges from `fields` [room.num_fields], which plan_items
    fills, and its block tables from `table`, both int32, at each run. `partials` must have room for
    `room.num_items` parts if there are merges."""
    end_items = room.num_items * ITEM_FIELDS
    launch = Launch(
        tile,
        fields[:end_items].view(-1, ITEM_FIELDS),
        fields[end_items:].view(-1, MERGE_FIELDS),
        partials.part,
        partials.lse,
    )
    return AttentionPlan(scale, window, table, (launch,))
