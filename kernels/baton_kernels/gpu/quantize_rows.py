"""8-bit rows with one float32 scale each.

    scale = max(|x|, LEAST_PEAK) / LIMIT,   code = x / scale, rounded to the nearest int8 or
    float8_e4m3fn; NaN and 0 for a row that is not finite
    x, codes [rows, dim] contiguous; scales [rows]

A program reads one row twice, BLOCK elements at a time: for the maximum and for the codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels import quantize_rows as twins
from baton_kernels.quantize_rows import LIMITS

BLOCK = 2048
#: Elements of a block for each warp: fewer would be read in pieces of less than 8 bytes.
_WARP_ELEMENTS = 128
_LEAST_PEAK = tl.constexpr(twins.LEAST_PEAK)


@triton.jit
def magnitude(x):
    """|x|, infinite for NaN, which a maximum may ignore."""
    return tl.where(tl.abs(x) <= float("inf"), tl.abs(x), float("inf"))


@triton.jit
def scale_of(peak, LIMIT: tl.constexpr):
    """Scale of a row from its largest magnitude."""
    return tl.where(peak < float("inf"), tl.maximum(peak, _LEAST_PEAK) / LIMIT, float("nan"))


@triton.jit
def _quantize_rows(
    x_ptr, codes_ptr, scales_ptr, dim,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr, IS_INT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * dim
    codes_ptr += row * dim
    dims = tl.arange(0, BLOCK)
    peaks = tl.zeros([BLOCK], tl.float32)
    for start in range(0, dim, BLOCK):
        x = tl.load(x_ptr + start + dims, mask=start + dims < dim, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, magnitude(x))
    scale = scale_of(tl.max(peaks, 0), LIMIT)
    tl.store(scales_ptr + row, scale)
    for start in range(0, dim, BLOCK):
        inside = start + dims < dim
        code = tl.load(x_ptr + start + dims, mask=inside, other=0.0).to(tl.float32)
        code = tl.where(scale > 0.0, code / scale, 0.0)
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
    block = min(BLOCK, triton.next_power_of_2(dim))
    _quantize_rows[(scales.numel(),)](
        x, codes, scales, dim, LIMIT=LIMITS[dtype], BLOCK=block, IS_INT=dtype == torch.int8,
        num_warps=max(1, min(4, block // _WARP_ELEMENTS)), enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scales
