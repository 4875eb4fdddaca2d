"""Linear layers in mxfp4 (OCP Microscaling Formats MX v1.0): each 32 numbers of a row of the weight
have 4 bits each (a sign, two bits of exponent, one of mantissa) and a power of two in common.

    y = x W^T (+ bias) (+ residual), W[o, i] = number[o, i] * 2^(power[o, i // 32] - 127)
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F

#: Numbers that share a power of two.
BLOCK = 32
_SCALE_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Mxfp4Linear:
    """Linear layer (baton_kernels.linear.Linear). A mixture's experts on a GPU run in this form
    (baton_kernels.gpu.grouped_mxfp4); called alone, it is dequantised.

    codes [num_out, pairs * 32] uint8: a pair of blocks, the first in the low nibbles and the second
    in the high ones; an odd number of blocks is padded with zeros. powers [pairs, num_out, 2]
    uint8. bias [num_out] or None.
    """

    codes: torch.Tensor
    powers: torch.Tensor
    bias: torch.Tensor | None
    num_in: int

    @property
    def num_out(self) -> int:
        return self.codes.shape[0]

    def dequantize(self) -> torch.Tensor:
        """[num_out, num_in] float32."""
        pairs = self.codes.view(self.num_out, -1, 1, BLOCK)
        numbers = torch.cat((pairs & 15, pairs >> 4), dim=2).flatten(1, 2)
        return dequantize_mxfp4(numbers, self.powers.transpose(0, 1).flatten(1))[:, : self.num_in]

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Linear."""
        y = F.linear(x.float(), self.dequantize())
        for term in (self.bias, residual):
            if term is not None:
                y = y + term.float()
        return y.to(out_dtype or x.dtype)


def keeps_mxfp4(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether experts in mxfp4 run as such here, with activations of `dtype`; otherwise they are
    dequantised."""
    is_known = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    return is_known and find_spec("triton") is not None


def dequantize_mxfp4(numbers: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """numbers [rows, blocks, 32] uint8 below 16, powers [rows, blocks] uint8 -> [rows, blocks * 32]
    float32."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=numbers.device)
    return torch.ldexp(values[numbers.int()], (powers.int() - _SCALE_BIAS)[..., None]).flatten(1)


def unpack_mxfp4(codes: torch.Tensor) -> torch.Tensor:
    """Numbers as a checkpoint has them, two neighbours in a byte, the first in its low nibble:
    codes [rows, blocks * 16] uint8 -> [rows, blocks, 32] uint8."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).view(len(codes), -1, BLOCK)


def pack_mxfp4(codes: torch.Tensor, powers: torch.Tensor, bias: torch.Tensor | None) -> Mxfp4Linear:
    """A checkpoint's codes [num_out, num_in / 2] uint8 and powers [num_out, num_in / 32] uint8,
    packed on their device."""
    num_blocks = powers.shape[1]
    numbers = unpack_mxfp4(codes)
    if num_blocks % 2:
        numbers, powers = F.pad(numbers, (0, 0, 0, 1)), F.pad(powers, (0, 1))
    packed = (numbers[:, ::2] | (numbers[:, 1::2] << 4)).flatten(1)
    by_pair = powers.view(len(powers), -1, 2).transpose(0, 1).contiguous()
    return Mxfp4Linear(packed, by_pair, bias, num_blocks * BLOCK)
