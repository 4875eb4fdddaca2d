"""8-bit rows with one float32 scale each: keys and values of a quantised KV pool, activations of
float8 linear layers.

scale = max(|x|, LEAST_PEAK) / LIMIT, code = x / scale, rounded to the nearest int8 or float8_e4m3fn

A row that is not all finite gets the scale NaN and codes 0, so that it dequantises to NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton_kernels.dispatch import op

#: The largest magnitude of a code.
LIMITS: Mapping[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: Smaller peaks count as zero: their scale would be subnormal.
LEAST_PEAK = 2.0**-100


@op
def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., dim] -> codes [..., dim] of `dtype`, one of LIMITS, and scales [...] float32. Halves
    of int8 round up."""
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(min=LEAST_PEAK) / LIMITS[dtype]
    is_finite = scale.isfinite()
    codes = torch.where(is_finite[..., None], wide / scale[..., None], 0.0)
    codes = torch.floor(codes + 0.5) if dtype == torch.int8 else codes
    return codes.to(dtype), torch.where(is_finite, scale, torch.nan)


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of quantize_rows up to rounding: [..., dim] of `dtype`."""
    return (codes.float() * scales[..., None]).to(dtype)
