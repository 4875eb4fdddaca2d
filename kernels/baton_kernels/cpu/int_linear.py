"""Linear layers over int8 or int4 weights in native code. Inputs are rounded to int8, row by row
and group by group; sums are exact.

weight[o, i] = (levels[o, i] - zeros[o, g]) * scales[o, g] with g = i // group_size; see linear.cpp.
"""

from __future__ import annotations

import ctypes

import torch

from baton_kernels.cpu.library import library
from baton_kernels.cpu.linear import Format, Weights, run, scratch_row_bytes, tiles
from baton_kernels.cpu.memory import Allocate, host_memory

_FORMATS = {8: Format.INT8, 4: Format.INT4}


def can_pack_integers(bits: int, group_size: int) -> bool:
    """Whether NativeIntLinear supports such weights here."""
    return bits in _FORMATS and group_size % (32 // bits) == 0 and library() is not None


class NativeIntLinear:
    """Linear layer (baton_kernels.linear.Linear) for weights that `can_pack_integers` accepts."""

    def __init__(
        self,
        levels: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bits: int,
        bias: torch.Tensor | None,
        allocate: Allocate = host_memory,
    ) -> None:
        """levels [num_out, num_in] uint8 in [0, 2^bits); scales and zeros [num_out, groups]
        float32, zeros None if all are 2^(bits - 1). allocate: allocates the packed weight."""
        self.num_out, self.num_in = levels.shape
        num_groups = scales.shape[1]
        self._packed = tiles(_words(levels, bits), allocate)
        self._scales = tiles(scales, allocate)
        self._zeros = None if zeros is None else tiles(zeros, allocate)
        self._bias = None if bias is None else bias.float().contiguous()
        self._call = Weights(
            num_out=self.num_out,
            num_in=self.num_in,
            format=_FORMATS[bits],
            group_size=self.num_in // num_groups,
            data=self._packed.data_ptr(),
            scales=self._scales.data_ptr(),
            zeros=None if self._zeros is None else self._zeros.data_ptr(),
            zero=float(1 << (bits - 1)),
            bias=None if self._bias is None else self._bias.data_ptr(),
            has_group_inputs=num_groups > 1,
        )
        #: Scratch bytes per row that baton_linear needs.
        self.scratch_row_bytes = scratch_row_bytes(self._call)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Linear."""
        return run(self._call, self.scratch_row_bytes, x, residual, out_dtype)

    @property
    def address(self) -> int:
        """Address of the `Weights`, valid as long as this object."""
        return ctypes.addressof(self._call)


def _words(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """[num_out, num_in] uint8 -> [num_out, words] int32: four bytes of k, or of k (low) and k + 4
    (high)."""
    if bits == 4:
        low, high = levels.reshape(len(levels), -1, 2, 4).unbind(2)
        levels = (low | (high << 4)).flatten(1)
    return levels.contiguous().view(torch.int32)
