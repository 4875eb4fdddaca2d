"""Rows in 8 bits, each with one float32 scale.

    scale = max |x| / LIMIT (1 if all are 0),   code = x / scale, rounded to the nearest int8 or float8_e4m3fn
    x, codes [rows, dim] contiguous; scales [rows]

A program takes one row, BLOCK elements at a time, twice: for the maximum and for the codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.quantize_rows import LIMITS

BLOCK = 2048


@triton.jit
def _quantize_rows(
    x_ptr, codes_ptr, scales_ptr, dim, LIMIT: tl.constexpr, BLOCK: tl.constexpr, IS_INT: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * dim
    codes_ptr += row * dim
    dims = tl.arange(0, BLOCK)
    peaks = tl.zeros([BLOCK], tl.float32)
    for start in range(0, dim, BLOCK):
        x = tl.load(x_ptr + start + dims, mask=start + dims < dim, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(x))
    peak = tl.max(peaks, 0)
    scale = tl.where(peak > 0.0, peak / LIMIT, 1.0)
    tl.store(scales_ptr + row, scale)
    for start in range(0, dim, BLOCK):
        inside = start + dims < dim
        code = tl.load(x_ptr + start + dims, mask=inside, other=0.0).to(tl.float32) / scale
        if IS_INT:
            code = tl.floor(code + 0.5)
        tl.store(codes_ptr + start + dims, code.to(codes_ptr.dtype.element_ty), mask=inside)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin. x must be contiguous."""
    if not x.is_contiguous():
        raise ValueError("x is not contiguous")
    dim = x.shape[-1]
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _quantize_rows[(scales.numel(),)](
        x, codes, scales, dim, LIMIT=LIMITS[dtype],
        BLOCK=min(BLOCK, triton.next_power_of_2(dim)), IS_INT=dtype == torch.int8,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scales
