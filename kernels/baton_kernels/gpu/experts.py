"""Grouped linear layers, y[r] = W[e(r)] x[r // repeat]: see the twin.

x [rows / repeat, num_in]; chosen: one expert per row; y [rows, num_out]

float8 experts run as in quantized_linear: x is rounded to float8, too, one group of inputs at a
time, and the sum of each group is scaled. Integers of 4 and 8 bits: level minus zero is multiplied
unscaled, and the sum of each run is scaled.

Rows are sorted by expert, and the rows of each expert are cut into tiles of ROWS. Row counts stay
on the device, so nothing waits for the host and CUDA graphs can capture the launch: it has as many
programs as there can be tiles, and programs without a tile return at once. Weights are read through
their addresses.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from baton_kernels.experts import GroupedLinear, RowOrder
from baton_kernels.experts import grouped_linear as grouped_op
from baton_kernels.experts import headwise_linear as headwise_op
from baton_kernels.gpu.quantize_rows import quantize_rows
from baton_kernels.gpu.routing import combine, order_rows, route, tile_rows_for

__all__ = ["combine", "grouped_linear", "headwise_linear", "order_rows", "route"]

COLUMNS, DEPTH = 64, 64
#: Output columns per integer tile; the levels of a whole run are in registers at once.
INT_COLUMNS = 32


@triton.jit
def _place(
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
def _store(
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


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_linear(
    x_ptr, addresses_ptr, biases_ptr, x_scales_ptr, scales_ptr, order_ptr, first_ptr, tile_end_ptr,
    y_ptr, num_rows, num_in, num_out, num_groups,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, REPEAT: tl.constexpr,
    IS_HEADWISE: tl.constexpr,
    HAS_BIASES: tl.constexpr, HAS_SCALES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert, rows, is_row = _place(
        tl.program_id(0), order_ptr, first_ptr, tile_end_ptr, num_rows,
        EXPERTS, EXPERTS_BLOCK, ROWS, IS_HEADWISE,
    )  # fmt: skip
    if expert >= EXPERTS:
        return
    dtype = x_ptr.dtype.element_ty
    # is_aligned holds: loads are of 16 bytes, and asynchronous.
    weight_ptr = tl.multiple_of(tl.load(addresses_ptr + expert).to(tl.pointer_type(dtype)), 16)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_out
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    group_size = num_in // num_groups
    for start in range(0, num_in, DEPTH):
        is_deep = start + depth < num_in
        x_at = (rows // REPEAT)[:, None] * num_in + start + depth[None, :]
        x = tl.load(x_ptr + x_at, mask=is_row[:, None] & is_deep[None, :], other=0.0)
        w_at = columns[None, :].to(tl.int64) * num_in + start + depth[:, None]
        w = tl.load(weight_ptr + w_at, mask=is_deep[:, None] & is_column[None, :], other=0.0)
        if HAS_SCALES:
            group = start // group_size
            x_scale = tl.load(
                x_scales_ptr + (rows // REPEAT) * num_groups + group, mask=is_row, other=0.0
            )
            scale_at = (expert * num_groups + group) * num_out + columns
            scale = tl.load(scales_ptr + scale_at, mask=is_column, other=0.0)
            sums += tl.dot(x, w) * x_scale[:, None] * scale[None, :]
        else:
            sums = tl.dot(x, w, sums, input_precision="ieee")
    _store(sums, rows, is_row, columns, expert, biases_ptr, y_ptr, num_out, HAS_BIASES)


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_int_linear(
    x_ptr, addresses_ptr, biases_ptr, scales_ptr, zeros_ptr, order_ptr, first_ptr, tile_end_ptr,
    y_ptr, num_rows, num_in, num_out, num_groups,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, REPEAT: tl.constexpr,
    IS_HEADWISE: tl.constexpr,
    HAS_BIASES: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BITS: tl.constexpr, RUN: tl.constexpr, RUN_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each loop step handles one run; 4-bit runs have their first half in the low nibbles and the
    second in the high. RUN_BLOCK: bytes of levels in a run, padded to a power of two."""
    expert, rows, is_row = _place(
        tl.program_id(0), order_ptr, first_ptr, tile_end_ptr, num_rows,
        EXPERTS, EXPERTS_BLOCK, ROWS, IS_HEADWISE,
    )  # fmt: skip
    if expert >= EXPERTS:
        return
    address = tl.load(addresses_ptr + expert)
    levels_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_out
    RUN_BYTES: tl.constexpr = RUN * BITS // 8
    depth = tl.arange(0, RUN_BLOCK)
    x_inside = is_row[:, None] & (depth < RUN_BYTES)[None, :]
    levels_inside = is_column[:, None] & (depth < RUN_BYTES)[None, :]
    x_at = x_ptr + (rows // REPEAT)[:, None] * num_in + depth[None, :]
    levels_at = levels_ptr + columns[:, None].to(tl.int64) * (num_in * BITS // 8) + depth[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    group_size = num_in // num_groups
    for step in range(num_in // RUN):
        of_group = (expert * num_groups + step * RUN // group_size) * num_out + columns
        scale = tl.load(scales_ptr + of_group, mask=is_column, other=0.0)
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + of_group, mask=is_column, other=0).to(tl.int32)[:, None]
        else:
            zero = 1 << (BITS - 1)
        x = tl.load(x_at + step * RUN, mask=x_inside, other=0.0)
        levels = tl.load(levels_at + step * RUN_BYTES, mask=levels_inside, other=0)
        if BITS == 8:
            whole = (levels.to(tl.int32) - zero).to(x.dtype)
            part = tl.dot(x, tl.trans(whole), input_precision="ieee")
        else:
            x_high = tl.load(x_at + step * RUN + RUN_BYTES, mask=x_inside, other=0.0)
            low = ((levels & 15).to(tl.int32) - zero).to(x.dtype)
            high = ((levels >> 4).to(tl.int32) - zero).to(x.dtype)
            part = tl.dot(x, tl.trans(low), input_precision="ieee")
            part = tl.dot(x_high, tl.trans(high), part, input_precision="ieee")
        sums += part * scale[None, :]
    _store(sums, rows, is_row, columns, expert, biases_ptr, y_ptr, num_out, HAS_BIASES)


def grouped_linear(
    x: torch.Tensor,
    chosen: torch.Tensor,
    experts: GroupedLinear,
    repeat: int,
    order: RowOrder | None = None,
) -> torch.Tensor:
    """See the twin, which runs mixed kinds of experts, and weights at odd addresses."""
    if experts.addresses is None or not experts.is_aligned:
        return grouped_op.twin(x, chosen, experts, repeat)
    num_experts, num_rows = len(experts.linears), chosen.numel()
    tile_rows = tile_rows_for(num_rows, num_experts)
    most_tiles = triton.cdiv(num_rows, tile_rows) + min(num_experts, num_rows)
    return _launch(
        x, experts, num_rows, repeat, order or order_rows(chosen, num_experts), most_tiles
    )


def headwise_linear(x: torch.Tensor, layers: GroupedLinear) -> torch.Tensor:
    """See the twin. Rows are where they are by rule: nothing is sorted."""
    if layers.addresses is None or not layers.is_aligned:
        return headwise_op.twin(x, layers)
    tokens, heads, num_in = x.shape
    num_tiles = heads * triton.cdiv(tokens, tile_rows_for(tokens * heads, heads))
    rows = x.reshape(-1, num_in)
    return _launch(rows, layers, len(rows), 1, None, num_tiles).view(tokens, heads, -1)


def _launch(
    x: torch.Tensor,
    experts: GroupedLinear,
    num_rows: int,
    repeat: int,
    order: RowOrder | None,
    num_tiles: int,
) -> torch.Tensor:
    """order: None if row r is of expert r % experts."""
    x, num_experts = x.contiguous(), len(experts.linears)
    y = x.new_empty(num_rows, experts.num_out)
    if not num_rows:
        return y
    scales, integers = experts.scales, experts.integers
    num_groups = 1 if scales is None else scales.shape[1]
    columns = COLUMNS if integers is None else INT_COLUMNS
    grid = (num_tiles, triton.cdiv(experts.num_out, columns))
    placed = (None, None, None) if order is None else (order.order, order.first, order.tile_ends)
    fixed: dict[str, Any] = {
        "EXPERTS": num_experts,
        "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
        "REPEAT": repeat,
        "IS_HEADWISE": order is None,
        "HAS_BIASES": experts.biases is not None,
        "ROWS": tile_rows_for(num_rows, num_experts),
        "COLUMNS": columns,
        "num_warps": 4,
    }
    if integers is not None:
        run = integers.run
        _grouped_int_linear[grid](
            x, experts.addresses, experts.biases, scales, experts.zeros, *placed, y,
            num_rows, experts.num_in, experts.num_out, num_groups,
            HAS_ZEROS=experts.zeros is not None, BITS=integers.bits, RUN=run,
            RUN_BLOCK=max(16, triton.next_power_of_2(run * integers.bits // 8)),
            enable_fp_fusion=True, **fixed,
        )  # fmt: skip
        return y
    x_scales = None
    if scales is not None:
        x, x_scales = quantize_rows(x.view(len(x), num_groups, -1), torch.float8_e4m3fn)
    depth = min(DEPTH, experts.num_in // num_groups) if num_groups > 1 else DEPTH
    _grouped_linear[grid](
        x, experts.addresses, experts.biases, x_scales, scales, *placed, y,
        num_rows, experts.num_in, experts.num_out, num_groups,
        HAS_SCALES=scales is not None, DEPTH=depth, enable_fp_fusion=False, **fixed,
    )  # fmt: skip
    return y
