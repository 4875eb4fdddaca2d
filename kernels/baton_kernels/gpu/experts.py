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

import torch
import triton
import triton.language as tl

from baton_kernels.experts import GroupedLinear
from baton_kernels.experts import grouped_linear as grouped_op
from baton_kernels.gpu.quantize_rows import quantize_rows

COLUMNS, DEPTH = 64, 64
#: Output columns per integer tile; the levels of a whole run are in registers at once.
INT_COLUMNS = 32


@triton.jit
def _expert_of(tile, tile_end_ptr, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr):
    """Expert of a tile (EXPERTS if there is no such tile), and the index of that expert's first
    tile."""
    experts = tl.arange(0, EXPERTS_BLOCK)
    ends = tl.load(tile_end_ptr + experts, mask=experts < EXPERTS, other=2147483647)
    return tl.sum((ends <= tile).to(tl.int32), 0), tl.max(tl.where(ends <= tile, ends, 0), 0)


@triton.jit
def _rows_of(tile, order_ptr, first_ptr, ROWS: tl.constexpr):
    """Rows of a tile, and a mask of the places that hold one. tile: (expert, index among the
    expert's tiles)."""
    expert, number = tile
    sorted_rows = tl.load(first_ptr + expert) + number * ROWS + tl.arange(0, ROWS)
    is_row = sorted_rows < tl.load(first_ptr + expert + 1)
    return tl.load(order_ptr + sorted_rows, mask=is_row, other=0), is_row


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


@triton.jit
def _grouped_linear(
    x_ptr, addresses_ptr, biases_ptr, x_scales_ptr, scales_ptr, order_ptr, first_ptr, tile_end_ptr,
    y_ptr, num_in, num_out, num_groups,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, REPEAT: tl.constexpr,
    HAS_BIASES: tl.constexpr, HAS_SCALES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert, before = _expert_of(tile, tile_end_ptr, EXPERTS, EXPERTS_BLOCK)
    if expert >= EXPERTS:
        return
    rows, is_row = _rows_of((expert, tile - before), order_ptr, first_ptr, ROWS)
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


@triton.jit
def _grouped_int_linear(
    x_ptr, addresses_ptr, biases_ptr, scales_ptr, zeros_ptr, order_ptr, first_ptr, tile_end_ptr,
    y_ptr, num_in, num_out, num_groups,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, REPEAT: tl.constexpr,
    HAS_BIASES: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BITS: tl.constexpr, RUN: tl.constexpr, RUN_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each loop step handles one run; 4-bit runs have their first half in the low nibbles and the
    second in the high. RUN_BLOCK: bytes of levels in a run, padded to a power of two."""
    tile = tl.program_id(0)
    expert, before = _expert_of(tile, tile_end_ptr, EXPERTS, EXPERTS_BLOCK)
    if expert >= EXPERTS:
        return
    rows, is_row = _rows_of((expert, tile - before), order_ptr, first_ptr, ROWS)
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
    x: torch.Tensor, chosen: torch.Tensor, experts: GroupedLinear, repeat: int
) -> torch.Tensor:
    """See the twin, which runs mixed kinds of experts, and weights at odd addresses."""
    if experts.addresses is None or not experts.is_aligned:
        return grouped_op.twin(x, chosen, experts, repeat)
    x, num_experts, num_rows = x.contiguous(), len(experts.linears), chosen.numel()
    y = x.new_empty(num_rows, experts.num_out)
    if not num_rows:
        return y
    scales, integers = experts.scales, experts.integers
    num_groups = 1 if scales is None else scales.shape[1]
    of_row = chosen.flatten().long()
    order = torch.argsort(of_row, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, of_row, torch.ones_like(of_row))
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    tile_rows = 16 if num_rows <= 16 * num_experts else 64
    tile_ends = (-(-counts // tile_rows)).cumsum(0).int()
    most_tiles = triton.cdiv(num_rows, tile_rows) + min(num_experts, num_rows)
    columns = COLUMNS if integers is None else INT_COLUMNS
    grid = (most_tiles, triton.cdiv(experts.num_out, columns))
    experts_block = triton.next_power_of_2(num_experts)
    if integers is not None:
        run = integers.run
        _grouped_int_linear[grid](
            x, experts.addresses, experts.biases, scales, experts.zeros, order, first, tile_ends, y,
            experts.num_in, experts.num_out, num_groups,
            EXPERTS=num_experts, EXPERTS_BLOCK=experts_block, REPEAT=repeat,
            HAS_BIASES=experts.biases is not None, HAS_ZEROS=experts.zeros is not None,
            BITS=integers.bits, RUN=run,
            RUN_BLOCK=max(16, triton.next_power_of_2(run * integers.bits // 8)),
            ROWS=tile_rows, COLUMNS=columns, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        return y
    x_scales = None
    if scales is not None:
        x, x_scales = quantize_rows(x.view(len(x), num_groups, -1), torch.float8_e4m3fn)
    depth = min(DEPTH, experts.num_in // num_groups) if num_groups > 1 else DEPTH
    _grouped_linear[grid](
        x, experts.addresses, experts.biases, x_scales, scales, order, first, tile_ends, y,
        experts.num_in, experts.num_out, num_groups,
        EXPERTS=num_experts, EXPERTS_BLOCK=experts_block, REPEAT=repeat,
        HAS_BIASES=experts.biases is not None, HAS_SCALES=scales is not None,
        ROWS=tile_rows, COLUMNS=columns, DEPTH=depth, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y
