"""Rounding weights to few levels: to the nearest, with the range that loses least."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.quantization.fitting import fit
from engine.quantization.weight import QuantizedWeight

#: Shares of a group's largest weight that are tried as the end of its range: clipping a few may
#: serve the rest.
_CLIPS = tuple(1 - 0.05 * i for i in range(9))
#: The largest number of float8 e4m3.
_FLOAT8_LARGEST = 448.0


def round_to_integers(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Symmetric levels of weight [num_out, num_in] in groups of `group_size` inputs, which must
    divide num_in.

    Of the ranges in _CLIPS each group takes the one with the smallest sum of squared errors. Scales
    are rounded to bfloat16, as they are stored.
    """
    num_out, num_in = weight.shape
    grouped = weight.float().view(num_out, -1, group_size)
    scales = _best_scales(grouped, bits, torch.ones(()))
    levels = _levels(grouped, scales, bits)
    return QuantizedWeight(levels.view(num_out, num_in), scales.view(num_out, -1), None, bits)


def round_by_inputs(
    weight: torch.Tensor, bits: int, group_size: int, gram: torch.Tensor
) -> QuantizedWeight:
    """As round_to_integers, so that outputs change little for inputs such as those of `gram`
    [num_in, num_in], the sum of their outer products: see engine.quantization.fitting."""
    middle = 1 << (bits - 1)
    importance = gram.diagonal().float().view(-1, group_size)
    scales: list[torch.Tensor] = []
    levels: list[torch.Tensor] = []

    def begin(block: torch.Tensor, _: torch.Tensor) -> Callable[[int], torch.Tensor]:
        of_block = _best_scales(block, bits, importance[len(scales)])
        scales.append(of_block)

        def column(i: int) -> torch.Tensor:
            levels.append(_levels(block[:, i], of_block[:, 0], bits))
            return (levels[-1].float() - middle) * of_block[:, 0]

        return column

    fit(weight, gram, group_size, begin)
    return QuantizedWeight(torch.stack(levels, 1), torch.cat(scales, 1), None, bits)


def _best_scales(grouped: torch.Tensor, bits: int, importance: torch.Tensor) -> torch.Tensor:
    """[..., 1] of groups [..., inputs]: of the ranges in _CLIPS those with the least squared error,
    by `importance` of inputs."""
    middle = 1 << (bits - 1)
    largest = grouped.abs().amax(-1, keepdim=True)
    best = torch.ones_like(largest)
    least = torch.full_like(largest, float("inf"))
    for clip in _CLIPS if bits < 8 else (1.0,):
        scales = _stored(largest * clip / (middle - 0.5))
        levels = (grouped / scales).round().clamp(-middle, middle - 1)
        error = ((levels * scales - grouped).square() * importance).sum(-1, keepdim=True)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best


def _levels(weight: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8."""
    middle = 1 << (bits - 1)
    return ((weight / scales).round().clamp(-middle, middle - 1) + middle).to(torch.uint8)


def round_to_float8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [num_out, num_in] -> the same as float8 e4m3, and scales [num_out, 1] float32
    (bfloat16 values)."""
    wide = weight.float()
    scales = _stored(wide.abs().amax(-1, keepdim=True) / _FLOAT8_LARGEST)
    levels = (wide / scales).clamp(-_FLOAT8_LARGEST, _FLOAT8_LARGEST)
    return levels.to(torch.float8_e4m3fn), scales


def _stored(scales: torch.Tensor) -> torch.Tensor:
    """As bfloat16 holds them; 1 where all weights are zero."""
    rounded = scales.bfloat16().float()
    return torch.where(rounded > 0, rounded, 1.0)
