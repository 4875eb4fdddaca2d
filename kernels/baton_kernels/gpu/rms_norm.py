"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

x [outer, inner, dim], rows at any stride; weight [dim]; y [outer, inner, dim] contiguous

A program handles enough rows for about TILE_ELEMENTS elements. Values are rounded where the twin
rounds them. Residuals are added by the epilogue of linear layers, not here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_ELEMENTS = 2048


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr, weight_ptr, y_ptr, num_rows, num_inner, outer_stride, inner_stride, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (dims < DIM)[None, :]
    at = rows // num_inner * outer_stride + rows % num_inner * inner_stride
    dtype = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + at[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    weight = tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    y = x * scale[:, None]
    if not IS_WIDE:
        y = y.to(dtype).to(tl.float32)
    y = y * weight[None, :]
    tl.store(y_ptr + rows[:, None] * DIM + dims[None, :], y.to(dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the twin. x's last dimension must be contiguous."""
    if x.stride(-1) != 1:
        raise ValueError("x's last dimension is not contiguous")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dim = x.shape[-1]
    rows_of = x if x.dim() == 3 else x.reshape(1, -1, dim)
    num_rows = rows_of.shape[0] * rows_of.shape[1]
    block = triton.next_power_of_2(dim)
    rows = max(1, TILE_ELEMENTS // block)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        rows_of, weight, y, num_rows, rows_of.shape[1], rows_of.stride(0), rows_of.stride(1), eps,
        DIM=dim, BLOCK=block, ROWS=rows, IS_WIDE=weight.dtype == torch.float32,
        num_warps=min(16, max(4, block // 1024)), enable_fp_fusion=False,
    )  # fmt: skip
    return y
