"""Quantised weights in Baton's form, independent of the checkpoint's layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton_kernels.mxfp4_linear import BLOCK, dequantize_mxfp4, unpack_mxfp4

#: Selects rows of a tensor [num_rows, ...], or rows and columns, which are whole groups of inputs;
#: returns the tensor itself if it selects all.
TakeRows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[o, i] = (levels[o, i] - zeros[o, g]) * scales[o, g] with g = i // group_size.

    levels [num_out, num_in] uint8 in [0, 2^bits); scales [num_out, groups] float32; zeros like
    scales, or None if all zero points are 2^(bits - 1) (symmetric). With mins (like scales, zeros
    None) weight[o, i] = levels[o, i] * scales[o, g] + mins[o, g] instead.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    mins: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.levels.shape

    @property
    def group_size(self) -> int:
        return self.levels.shape[1] // self.scales.shape[1]

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def part(self, take: TakeRows) -> QuantizedWeight:
        """A selection of outputs and groups of inputs, copied unless it is all of them."""
        zeros = None if self.zeros is None else _own(take, self.zeros)
        mins = None if self.mins is None else _own(take, self.mins)
        return QuantizedWeight(
            _own(take, self.levels), _own(take, self.scales), zeros, self.bits, mins
        )

    def with_zeros(self) -> QuantizedWeight:
        """The same weight with zero points instead of minima, up to float32's rounding."""
        if self.mins is None:
            return self
        # A group whose scale is zero has one value, which becomes the scale.
        is_flat = self.scales == 0
        scales = torch.where(is_flat, self.mins, self.scales)
        zeros = torch.where(is_flat, -1.0, -self.mins / self.scales)
        levels = self.levels
        if is_flat.any():
            levels = levels.clone()
            levels.view(*scales.shape, -1)[is_flat] = 0
        return QuantizedWeight(levels, scales, zeros, self.bits)

    def dequantize(self) -> torch.Tensor:
        """[num_out, num_in] float32."""
        num_out, num_groups = self.scales.shape
        grouped = self.levels.view(num_out, num_groups, -1).float()
        if self.mins is not None:
            whole = grouped * self.scales[:, :, None] + self.mins[:, :, None]
            return whole.view(self.levels.shape)
        zeros = self.middle if self.zeros is None else self.zeros[:, :, None]
        return ((grouped - zeros) * self.scales[:, :, None]).view(self.levels.shape)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """weight[o, i] = codes[o, i] * scales[o, i // group_size]: codes [num_out, num_in]
    float8_e4m3fn, scales [num_out, groups] float32. The last group may be smaller; one group means
    one scale per output."""

    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def part(self, take: TakeRows) -> Float8Weight:
        """See QuantizedWeight."""
        # Some builds of torch cannot select rows of float8.
        codes = _own(take, self.codes.view(torch.uint8)).view(self.codes.dtype)
        return Float8Weight(codes, _own(take, self.scales), self.group_size)

    def dequantize(self) -> torch.Tensor:
        """[num_out, num_in] float32."""
        wide = self.codes.float()
        for group in range(self.scales.shape[1]):
            first = group * self.group_size
            wide[:, first : first + self.group_size] *= self.scales[:, group, None]
        return wide


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """A weight in mxfp4 as a checkpoint has it: codes [num_out, num_in / 2] uint8, neighbours in a
    byte; powers [num_out, num_in / 32] uint8. See baton_kernels.mxfp4_linear."""

    codes: torch.Tensor
    powers: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        num_out, num_bytes = self.codes.shape
        return torch.Size((num_out, 2 * num_bytes))

    @property
    def has_whole_blocks(self) -> bool:
        """A selection of inputs may begin or end within a block: it cannot be dequantised."""
        return self.shape[1] == self.powers.shape[1] * BLOCK

    def part(self, take: TakeRows) -> Mxfp4Weight:
        """See QuantizedWeight."""
        return Mxfp4Weight(_own(take, self.codes), _own(take, self.powers))

    def dequantize(self) -> torch.Tensor:
        """[num_out, num_in] float32."""
        return dequantize_mxfp4(unpack_mxfp4(self.codes), self.powers)


def _own(take: TakeRows, whole: torch.Tensor) -> torch.Tensor:
    rows = take(whole)
    return rows if rows is whole else rows.clone()


#: A layer's weight that stays quantised.
StoredWeight = QuantizedWeight | Float8Weight | Mxfp4Weight


def stack(parts: Sequence[StoredWeight]) -> StoredWeight:
    """Stack weights of layers with the same input. All must be integers, which take the most bits
    and the smallest groups of them, or float8 of one group size, or mxfp4."""
    if len(parts) == 1:
        return parts[0]
    integers = [part for part in parts if isinstance(part, QuantizedWeight)]
    floats = [part for part in parts if isinstance(part, Float8Weight)]
    blocks = [part for part in parts if isinstance(part, Mxfp4Weight)]
    if len(parts) not in (len(integers), len(floats), len(blocks)):
        raise ValueError("weights of different schemes cannot be stacked")
    if blocks:
        codes = torch.cat([part.codes for part in blocks])
        return Mxfp4Weight(codes, torch.cat([part.powers for part in blocks]))
    return _stack_integers(integers) if integers else _stack_floats(floats)


def _stack_floats(parts: Sequence[Float8Weight]) -> Float8Weight:
    if len({part.group_size for part in parts}) != 1:
        raise ValueError("weights of different schemes cannot be stacked")
    # Some builds of torch cannot concatenate float8.
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    scales = torch.cat([part.scales for part in parts])
    return Float8Weight(codes, scales, parts[0].group_size)


def _stack_integers(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    bits, num_groups = max(p.bits for p in parts), max(p.scales.shape[1] for p in parts)
    if any(num_groups % part.scales.shape[1] for part in parts):
        raise ValueError("weights of different schemes cannot be stacked")
    alike = [_refined(part.with_zeros(), bits, num_groups) for part in parts]
    zeros = None
    if any(part.zeros is not None for part in alike):
        zeros = torch.cat([_zeros(part) for part in alike])
    return QuantizedWeight(
        torch.cat([part.levels for part in alike]),
        torch.cat([part.scales for part in alike]),
        zeros,
        bits,
    )


def _refined(part: QuantizedWeight, bits: int, num_groups: int) -> QuantizedWeight:
    """The same weight with more bits and smaller groups."""
    times = num_groups // part.scales.shape[1]
    if part.bits == bits and times == 1:
        return part
    zeros = _zeros(part) if part.zeros is not None or part.bits != bits else None
    return QuantizedWeight(
        part.levels,
        part.scales.repeat_interleave(times, 1),
        None if zeros is None else zeros.repeat_interleave(times, 1),
        bits,
    )


def _zeros(part: QuantizedWeight) -> torch.Tensor:
    if part.zeros is not None:
        return part.zeros
    return torch.full_like(part.scales, part.middle)
