"""Batch-invariant linear layers: see the twin.

    x [rows, num_in]; weight [num_out, num_in]; bias [num_out]; residual, y [rows, num_out]

A program computes BLOCK_M rows by BLOCK_N outputs. The tile depends on the dtype alone, one program
sums all inputs in order, and padding rows are computed like real ones, so a row's bits are the same
in any batch and at any place in it. The cost: few rows leave most of a tile empty, and narrow
layers have few programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "x_stride"])
def _fixed_linear(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, num_rows, num_out, num_in, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, output tiles): programs that share weights are adjacent."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ins = tl.arange(0, BLOCK_K)
    is_row, is_out = (rows < num_rows)[:, None], (outs < num_out)[None, :]
    x_at = x_ptr + rows[:, None].to(tl.int64) * x_stride + ins[None, :]
    w_at = weight_ptr + outs[None, :].to(tl.int64) * num_in + ins[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, num_in, BLOCK_K):
        there = start + ins < num_in
        x = tl.load(x_at + start, mask=is_row & there[None, :], other=0.0)
        w = tl.load(w_at + start, mask=is_out & there[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    inside = is_row & is_out
    at = rows[:, None].to(tl.int64) * num_out + outs[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outs, mask=outs < num_out, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside)


def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See the twin. Weight, bias and residual must be contiguous; rows of x must be contiguous but
    may be apart."""
    if x.stride(1) != 1:
        raise ValueError("rows of x are not contiguous")
    num_rows, num_in = x.shape
    num_out = len(weight)
    y = torch.empty(num_rows, num_out, dtype=out_dtype, device=x.device)
    if not num_rows:
        return y
    block_m, block_n, block_k = (16, 64, 32) if x.dtype == torch.float32 else (64, 128, 64)
    _fixed_linear[(triton.cdiv(num_rows, block_m), triton.cdiv(num_out, block_n))](
        x, weight, bias, residual, y, num_rows, num_out, num_in, x.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return y
