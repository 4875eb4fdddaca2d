"""Experts in 16 or 32 bits, and in float8, for a GPU.

float8 experts run as in quantized_linear: x is rounded to float8, too, one group of inputs at a
time, and the sum of each group is scaled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.expert_tiles import Tiles, place, store
from baton_kernels.gpu.quantize_rows import quantize_rows
from baton_kernels.stacked_weights import Float8Stack, PlainStack

COLUMNS, DEPTH = 64, 64


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_linear(
    x_ptr, addresses_ptr, biases_ptr, x_scales_ptr, scales_ptr, order_ptr, first_ptr, tile_end_ptr,
    y_ptr, num_rows, num_in, num_out, num_groups,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, REPEAT: tl.constexpr,
    IS_HEADWISE: tl.constexpr,
    HAS_BIASES: tl.constexpr, HAS_SCALES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert, rows, is_row = place(
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
    store(sums, rows, is_row, columns, expert, biases_ptr, y_ptr, num_out, HAS_BIASES)


def run_plain(x: torch.Tensor, y: torch.Tensor, weights: PlainStack, tiles: Tiles) -> None:
    """Fill y."""
    _run(x, None, y, weights, None, tiles)


def run_float8(x: torch.Tensor, y: torch.Tensor, weights: Float8Stack, tiles: Tiles) -> None:
    """Fill y."""
    num_groups = weights.scales.shape[1]
    codes, x_scales = quantize_rows(x.view(len(x), num_groups, -1), torch.float8_e4m3fn)
    _run(codes, x_scales, y, weights, weights.scales, tiles)


def _run(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    y: torch.Tensor,
    weights: PlainStack | Float8Stack,
    scales: torch.Tensor | None,
    tiles: Tiles,
) -> None:
    num_in, num_out = tiles.experts.num_in, tiles.experts.num_out
    num_groups = 1 if scales is None else scales.shape[1]
    depth = min(DEPTH, num_in // num_groups) if num_groups > 1 else DEPTH
    _grouped_linear[tiles.grid(COLUMNS)](
        x, weights.addresses, weights.biases, x_scales, scales, *tiles.placed, y,
        tiles.num_rows, num_in, num_out, num_groups,
        HAS_BIASES=weights.biases is not None, HAS_SCALES=scales is not None,
        COLUMNS=COLUMNS, DEPTH=depth, enable_fp_fusion=False, **tiles.fixed,
    )  # fmt: skip
