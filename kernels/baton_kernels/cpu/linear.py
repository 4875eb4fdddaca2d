"""Linear layers in native code: weights are packed once and read as one stream. See linear.cpp for
layouts and the order of sums."""

from __future__ import annotations

import ctypes
import math
from enum import IntEnum

import torch

from baton_kernels.cpu.calling import NATIVE_DTYPES, STORED_NUMBERS
from baton_kernels.cpu.library import library, loaded
from baton_kernels.cpu.memory import Allocate, host_memory

#: Outputs per packed tile.
TILE = 64
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class Format(IntEnum):
    """Same values as in linear.cpp."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    INT4 = 4


_FORMATS = {
    torch.float32: Format.F32,
    torch.bfloat16: Format.BF16,
    torch.float16: Format.F16,
}


class Weights(ctypes.Structure):
    """`Weights` of linear.cpp."""

    _fields_ = (
        *((name, _LONG) for name in ("num_out", "num_in", "format", "group_size")),
        *((name, _POINTER) for name in ("data", "scales", "zeros")),
        ("zero", _FLOAT),
        ("bias", _POINTER),
        ("has_group_inputs", _LONG),
    )


def can_pack(weight: torch.Tensor) -> bool:
    """Whether NativeLinear supports the weight [num_out, num_in] here."""
    is_whole = weight.shape[1] * weight.element_size() % 4 == 0
    return weight.dtype in NATIVE_DTYPES and is_whole and library() is not None


class NativeLinear:
    """Linear layer (baton_kernels.linear.Linear) for weights that `can_pack` accepts."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, allocate: Allocate = host_memory
    ) -> None:
        """allocate: allocates the packed weight."""
        self.num_out, self.num_in = weight.shape
        if weight.dtype == torch.float16:
            weight = _in_planes(weight)
        self._packed = tiles(weight.contiguous().view(torch.int32), allocate)
        self._bias = None if bias is None else bias.float().contiguous()
        self._call = Weights(
            num_out=self.num_out,
            num_in=self.num_in,
            format=_FORMATS[weight.dtype],
            data=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
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


def scratch_row_bytes(weights: Weights) -> int:
    """Scratch bytes per row that baton_linear needs."""
    found = ctypes.c_int64()
    loaded().baton_linear_scratch(ctypes.addressof(weights), ctypes.addressof(found))
    return found.value


def run(
    weights: Weights,
    scratch_row_bytes: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Call baton_linear; see Linear for the tensors."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    rows = x.shape[0]
    out = x.new_empty(rows, weights.num_out, dtype=out_dtype or x.dtype)
    scratch = x.new_empty(rows * scratch_row_bytes, dtype=torch.uint8)
    loaded().baton_linear(
        ctypes.addressof(weights),
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        rows,
        STORED_NUMBERS.get(x.dtype),
        out.dtype == torch.float32,
        scratch.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def tiles(words: torch.Tensor, allocate: Allocate) -> torch.Tensor:
    """[num_out, words] of 32-bit elements -> [tiles, words, 64] in memory of `allocate`, padded
    with zero outputs."""
    num_out, num_words = words.shape
    words = words.contiguous()
    shape = (-(-num_out // TILE), num_words, TILE)
    packed = allocate(math.prod(shape) * words.element_size()).view(words.dtype).view(shape)
    loaded().baton_pack(
        words.data_ptr(), num_out, num_words, packed.data_ptr(), torch.get_num_threads()
    )
    return packed


def _in_planes(weight: torch.Tensor) -> torch.Tensor:
    """Pad float16 [num_out, num_in] to whole vectors of 16 outputs and reorder it: tiles() stores
    16 outputs at two values of k; here the first half holds the 16 outputs at one k and the second
    half at the other, the order in which CPUs widen float16."""
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % 16))
    pairs = padded.reshape(-1, 8, 2, weight.shape[1] // 2, 2)
    return pairs.permute(0, 4, 1, 3, 2).reshape(padded.shape)
