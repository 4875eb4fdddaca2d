"""Rounding weights to few levels, without data: to the nearest, with the range that loses least."""

from __future__ import annotations

import torch

from baton.quantization.weight import QuantizedWeight

#: Shares of a group's largest weight that are tried as the end of its range: clipping a few may serve the rest.
_CLIPS = tuple(1 - 0.05 * i for i in range(9))
#: The largest number of float8 e4m3.
_FLOAT8_LARGEST = 448.0


def round_to_integers(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Symmetric levels of weight [num_out, num_in] in groups of `group_size` inputs, which must divide num_in.

    Of the ranges in _CLIPS each group takes the one with the smallest sum of squared errors. Scales are rounded to
    bfloat16, as they are stored.
    """
    num_out, num_in = weight.shape
    grouped = weight.float().view(num_out, -1, group_size)
    middle = 1 << (bits - 1)
    largest = grouped.abs().amax(-1, keepdim=True)
    best_error = torch.full_like(largest, float("inf"))
    best_levels = torch.zeros_like(grouped, dtype=torch.uint8)
    best_scales = torch.ones_like(largest)
    for clip in _CLIPS if bits < 8 else (1.0,):
        scales = _stored(largest * clip / (middle - 0.5))
        levels = (grouped / scales).round().clamp(-middle, middle - 1)
        error = (levels * scales - grouped).square().sum(-1, keepdim=True)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scales = torch.where(is_better, scales, best_scales)
        best_levels = torch.where(is_better, (levels + middle).to(torch.uint8), best_levels)
    return QuantizedWeight(
        best_levels.view(num_out, num_in), best_scales.view(num_out, -1), None, bits
    )


def round_to_float8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [num_out, num_in] -> the same as float8 e4m3, and scales [num_out, 1] float32 (bfloat16 values)."""
    wide = weight.float()
    scales = _stored(wide.abs().amax(-1, keepdim=True) / _FLOAT8_LARGEST)
    levels = (wide / scales).clamp(-_FLOAT8_LARGEST, _FLOAT8_LARGEST)
    return levels.to(torch.float8_e4m3fn), scales


def _stored(scales: torch.Tensor) -> torch.Tensor:
    """As bfloat16 holds them; 1 where all weights are zero."""
    rounded = scales.bfloat16().float()
    return torch.where(rounded > 0, rounded, 1.0)
