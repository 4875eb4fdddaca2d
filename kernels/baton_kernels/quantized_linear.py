"""Linear layers with quantised weights: y = x W^T (+ bias) (+ residual), W [out, in] kept as levels
or codes.

    int:  W[o, i] = (level[o, i] - zero[o, g]) * scale[o, g], g = i // group_size,
          levels of 4 or 8 bits
    fp8:  W[o, i] = code[o, i] * scale[o, g], and x is rounded to float8_e4m3fn too, with a scale
          per row and group; one group of all inputs, or groups of group_size (as DeepSeek-V3 was
          trained: arXiv 2412.19437, section 3.3.2)

Sums are float32. x [rows, in]; bias [out]; residual, y [rows, out], y of x's dtype or `out_dtype`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from baton_kernels.dispatch import op
from baton_kernels.quantize_rows import quantize_rows

#: Group sizes of float8 that a kernel handles in one step, besides a single group of all inputs.
_FLOAT8_GROUPS = (32, 64, 128)
#: Maximum inputs that a kernel handles at once. A run never crosses a group.
MAX_RUN = 128


@dataclass(frozen=True, slots=True)
class IntWeight:
    """Integer weights, packed. levels: 8 bits: uint8 [out, in]. 4 bits: uint8 [out, in / 2]; the
    first half of each run of inputs is in the low nibbles and the second half in the high ones, so
    that unpacking needs no shuffle.

    scales [groups, out] float32; zeros [groups, out] int16, or None if all are 2^(bits - 1)
    (symmetric).
    """

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int

    @property
    def num_out(self) -> int:
        return self.levels.shape[0]

    @property
    def num_in(self) -> int:
        return self.levels.shape[1] * 8 // self.bits

    @property
    def run(self) -> int:
        """Inputs per run."""
        return math.gcd(self.num_in // self.scales.shape[0], MAX_RUN)

    def to(self, device: torch.device) -> IntWeight:
        """The weight on `device`."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return IntWeight(self.levels.to(device), self.scales.to(device), zeros, self.bits)


def can_pack_int_weight(bits: int, group_size: int) -> bool:
    """Whether an IntWeight runs well with such weights in the Triton kernel: in runs without
    padding."""
    return bits in (4, 8) and group_size % 32 == 0 and find_spec("triton") is not None


def pack_int_weight(
    levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int
) -> IntWeight:
    """Pack levels [out, in] uint8 in [0, 2^bits); scales, zeros [out, groups]. Raises ValueError
    for shapes that IntWeight cannot hold."""
    num_out, num_in = levels.shape
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits: 4 and 8 are known")
    if zeros is not None and not torch.equal(zeros, zeros.round()):
        raise ValueError("zero points are not whole")
    run = math.gcd(num_in // scales.shape[1], MAX_RUN)
    if bits == 4:
        if run % 2:
            raise ValueError(f"groups of {num_in // scales.shape[1]} inputs cannot be halved")
        halves = levels.view(num_out, num_in // run, 2, run // 2)
        levels = (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(num_out, num_in // 2)
    whole = None if zeros is None else zeros.t().to(torch.int16).contiguous()
    return IntWeight(levels.contiguous(), scales.t().float().contiguous(), whole, bits)


def dequantize(weight: IntWeight) -> torch.Tensor:
    """[out, in] float32."""
    levels, group_size = weight.levels, weight.num_in // weight.scales.shape[0]
    if weight.bits == 4:
        halves = levels.view(weight.num_out, -1, 1, weight.run // 2)
        levels = torch.cat((halves & 15, halves >> 4), dim=2)
    grouped = levels.reshape(weight.num_out, -1, group_size).float()
    middle = 1 << (weight.bits - 1)
    zeros = middle if weight.zeros is None else weight.zeros.t()[..., None]
    return ((grouped - zeros) * weight.scales.t()[..., None]).view(weight.num_out, weight.num_in)


@op
def int_linear(
    x: torch.Tensor,
    weight: IntWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See the head of this file."""
    y = F.linear(x.float(), dequantize(weight))
    return _finish(y, bias, residual, out_dtype or x.dtype)


@dataclass(frozen=True, slots=True)
class IntLinear:
    """Linear layer (baton_kernels.linear.Linear) with an IntWeight. bias [out] or None."""

    weight: IntWeight
    bias: torch.Tensor | None

    @property
    def num_in(self) -> int:
        return self.weight.num_in

    @property
    def num_out(self) -> int:
        return self.weight.num_out

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Linear."""
        return int_linear(x, self.weight, self.bias, residual, out_dtype)


def can_group_float8(num_in: int, group_size: int) -> bool:
    """Whether fp8_linear supports weights with a scale per `group_size` inputs."""
    return group_size == num_in or (group_size in _FLOAT8_GROUPS and num_in % group_size == 0)


@op
def fp8_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """codes [out, in] float8_e4m3fn; scales [groups, out] float32."""
    num_groups = len(scales)
    x_codes, x_scales = quantize_rows(x.reshape(len(x), num_groups, -1), codes.dtype)
    y = torch.zeros(len(x), len(codes), device=x.device)
    for g, part in enumerate(codes.float().chunk(num_groups, 1)):
        y += F.linear(x_codes[:, g].float(), part) * (x_scales[:, g, None] * scales[g])
    return _finish(y, bias, residual, out_dtype or x.dtype)


@dataclass(frozen=True, slots=True)
class Float8Linear:
    """Linear layer (baton_kernels.linear.Linear) with codes [out, in] float8_e4m3fn and scales
    [groups, out] float32. bias [out] or None."""

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    @property
    def num_in(self) -> int:
        return self.codes.shape[1]

    @property
    def num_out(self) -> int:
        return self.codes.shape[0]

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Linear."""
        return fp8_linear(x, self.codes, self.scales, self.bias, residual, out_dtype)


def _finish(
    y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if bias is not None:
        y = y + bias.float()
    if residual is not None:
        y = y + residual.float()
    return y.to(dtype)
