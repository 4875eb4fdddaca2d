"""Experts in mxfp4, for a GPU: numbers of 4 bits become levels of twice their value in registers,
which are multiplied unscaled, and the sum of each block is multiplied by the block's power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.expert_tiles import Tiles, place, store
from baton_kernels.mxfp4_linear import BLOCK
from baton_kernels.stacked_weights import Mxfp4Stack

COLUMNS = 64

#: Twice the value of 4 bits without their sign, four bits each, as int32: 0, 1, 2, 3, 4, 6, 8, 12.
_DOUBLED = tl.constexpr(0xC8643210 - (1 << 32))


@triton.jit
def _levels(numbers):
    """Twice the value of numbers of 4 bits, int32."""
    table = numbers * 0 + _DOUBLED
    magnitude = (table >> ((numbers & 7) * 4)) & 15
    return tl.where((numbers & 8) != 0, -magnitude, magnitude)


@triton.jit
def _power(powers):
    """Half of two to the power of a stored exponent; those below 2 count as 0."""
    return (tl.maximum(powers - 1, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_mxfp4_linear(
    x_ptr, addresses_ptr, biases_ptr, powers_ptr, order_ptr, first_ptr, tile_end_ptr,
    y_ptr, num_rows, num_in, num_out, num_pairs,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, REPEAT: tl.constexpr,
    IS_HEADWISE: tl.constexpr, HAS_BIASES: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each loop step handles a pair of blocks: one in the low nibbles, one in the high."""
    expert, rows, is_row = place(
        tl.program_id(0), order_ptr, first_ptr, tile_end_ptr, num_rows,
        EXPERTS, EXPERTS_BLOCK, ROWS, IS_HEADWISE,
    )  # fmt: skip
    if expert >= EXPERTS:
        return
    address = tl.load(addresses_ptr + expert)
    codes_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_out
    depth = tl.arange(0, BLOCK)
    x_at = x_ptr + (rows // REPEAT)[:, None] * num_in + depth[None, :]
    codes_at = codes_ptr + columns[:, None].to(tl.int64) * (num_pairs * BLOCK) + depth[None, :]
    powers_at = powers_ptr + expert * num_pairs * num_out + columns
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for pair in range(num_pairs):
        start = pair * 2 * BLOCK
        powers = tl.load(powers_at + pair * num_out, mask=is_column, other=0).to(tl.int32)
        x_low = tl.load(x_at + start, mask=is_row[:, None], other=0.0)
        # An odd number of blocks is padded with one of zeros.
        has_high = is_row[:, None] & (start + BLOCK + depth < num_in)[None, :]
        x_high = tl.load(x_at + start + BLOCK, mask=has_high, other=0.0)
        codes = tl.load(codes_at + pair * BLOCK, mask=is_column[:, None], other=0).to(tl.int32)
        low = tl.trans(_levels(codes & 15).to(x_low.dtype))
        high = tl.trans(_levels(codes >> 4).to(x_low.dtype))
        sums += tl.dot(x_low, low, input_precision="ieee") * _power(powers & 255)[None, :]
        sums += tl.dot(x_high, high, input_precision="ieee") * _power(powers >> 8 & 255)[None, :]
    store(sums, rows, is_row, columns, expert, biases_ptr, y_ptr, num_out, HAS_BIASES)


def run_mxfp4(x: torch.Tensor, y: torch.Tensor, weights: Mxfp4Stack, tiles: Tiles) -> None:
    """Fill y."""
    _grouped_mxfp4_linear[tiles.grid(COLUMNS)](
        x, weights.addresses, weights.biases, weights.powers, *tiles.placed, y,
        tiles.num_rows, tiles.experts.num_in, tiles.experts.num_out, weights.powers.shape[1],
        HAS_BIASES=weights.biases is not None, BLOCK=BLOCK, COLUMNS=COLUMNS,
        enable_fp_fusion=True, **tiles.fixed,
    )  # fmt: skip
