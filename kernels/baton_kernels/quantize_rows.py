"""Rows in 8 bits, each with one float32 scale: keys and values of a quantised KV pool, activations of float8 linears.

scale = max |x| / LIMIT (1 if all are 0),   code = x / scale, rounded to the nearest int8 or float8_e4m3fn
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton_kernels.dispatch import op

#: The largest magnitude of a code.
LIMITS: Mapping[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@op
def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., dim] -> codes [..., dim] of `dtype`, one of LIMITS, and scales [...] float32. Halves of int8 round up."""
    wide = x.float()
    peak = wide.abs().amax(-1)
    scale = torch.where(peak > 0, peak / LIMITS[dtype], 1.0)
    codes = wide / scale[..., None]
    return (torch.floor(codes + 0.5) if dtype == torch.int8 else codes).to(dtype), scale


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse, but for rounding: [..., dim] of `dtype`."""
    return (codes.float() * scales[..., None]).to(dtype)
