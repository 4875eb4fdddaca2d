"""Experts in integers of 4 and 8 bits, for a GPU: level minus zero is multiplied unscaled, and the
sum of each run is scaled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.expert_tiles import Tiles, place, store
from baton_kernels.stacked_weights import IntStack

#: Output columns per tile; the levels of a whole run are in registers at once.
COLUMNS = 32


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
    expert, rows, is_row = place(
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
    store(sums, rows, is_row, columns, expert, biases_ptr, y_ptr, num_out, HAS_BIASES)


def run_integers(x: torch.Tensor, y: torch.Tensor, weights: IntStack, tiles: Tiles) -> None:
    """Fill y."""
    run, bits = weights.run, weights.bits
    _grouped_int_linear[tiles.grid(COLUMNS)](
        x, weights.addresses, weights.biases, weights.scales, weights.zeros, *tiles.placed, y,
        tiles.num_rows, tiles.experts.num_in, tiles.experts.num_out, weights.scales.shape[1],
        HAS_BIASES=weights.biases is not None, HAS_ZEROS=weights.zeros is not None,
        BITS=bits, RUN=run, RUN_BLOCK=max(16, triton.next_power_of_2(run * bits // 8)),
        COLUMNS=COLUMNS, enable_fp_fusion=True, **tiles.fixed,
    )  # fmt: skip
