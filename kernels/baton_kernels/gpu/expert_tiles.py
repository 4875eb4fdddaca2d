"""Tiles of grouped linear layers, y[r] = W[e(r)] x[r // repeat]: see baton_kernels.gpu.experts.

x [rows / repeat, num_in]; chosen: one expert per row; y [rows, num_out]

Rows are sorted by expert, and the rows of each expert are cut into tiles of ROWS. Row counts stay
on the device, so nothing waits for the host and CUDA graphs can capture the launch: it has as many
programs as there can be tiles, and programs without a tile return at once. Weights are read through
their addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from baton_kernels.experts import GroupedLinear, RowOrder
from baton_kernels.gpu.routing import tile_rows_for


@triton.jit
def place(
    tile, order_ptr, first_ptr, tile_end_ptr, num_rows,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    IS_HEADWISE: tl.constexpr,
):  # fmt: skip
    """Expert of a tile (EXPERTS if there is no such tile), its rows, and a mask of the places that
    hold one. IS_HEADWISE: row r is of expert r % EXPERTS."""
    places = tl.arange(0, ROWS)
    if IS_HEADWISE:
        num_tokens = num_rows // EXPERTS
        num_tiles = tl.cdiv(num_tokens, ROWS)
        expert = tile // num_tiles
        tokens = tile % num_tiles * ROWS + places
        is_row = tokens < num_tokens
        rows = tokens.to(tl.int64) * EXPERTS + expert
    else:
        experts = tl.arange(0, EXPERTS_BLOCK)
        ends = tl.load(tile_end_ptr + experts, mask=experts < EXPERTS, other=2147483647)
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        before = tl.max(tl.where(ends <= tile, ends, 0), 0)
        is_there = expert < EXPERTS
        begin = tl.load(first_ptr + expert, mask=is_there, other=0)
        sorted_rows = begin + (tile - before) * ROWS + places
        is_row = sorted_rows < tl.load(first_ptr + expert + 1, mask=is_there, other=0)
        rows = tl.load(order_ptr + sorted_rows, mask=is_row, other=0).to(tl.int64)
    return expert, rows, is_row


@triton.jit
def store(
    sums, rows, is_row, columns, expert, biases_ptr, y_ptr, num_out, HAS_BIASES: tl.constexpr
):
    """Store y = sums + the expert's bias."""
    is_column = columns < num_out
    if HAS_BIASES:
        bias = tl.load(biases_ptr + expert * num_out + columns, mask=is_column, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    y_at = rows[:, None] * num_out + columns[None, :]
    tl.store(
        y_ptr + y_at, sums.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :]
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """A launch without its weights. order: None if row r is of expert r % experts."""

    experts: GroupedLinear
    num_rows: int
    repeat: int
    order: RowOrder | None
    num_tiles: int

    def grid(self, columns: int) -> tuple[int, int]:
        """Programs, with so many columns each."""
        return self.num_tiles, triton.cdiv(self.experts.num_out, columns)

    @property
    def placed(self) -> tuple[torch.Tensor | None, ...]:
        """order, first and tile_ends for `place`."""
        if self.order is None:
            return None, None, None
        return self.order.order, self.order.first, self.order.tile_ends

    @property
    def fixed(self) -> dict[str, Any]:
        """Constants of every form's kernel."""
        num_experts = len(self.experts.linears)
        return {
            "EXPERTS": num_experts,
            "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
            "REPEAT": self.repeat,
            "IS_HEADWISE": self.order is None,
            "ROWS": tile_rows_for(self.num_rows, num_experts),
            "num_warps": 4,
        }
