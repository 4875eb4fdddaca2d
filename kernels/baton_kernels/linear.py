"""Linear layers: y = x W^T (+ bias) (+ residual), in the fastest form for their device.

`pack_linear` chooses the form once, at load, by device, dtype and shape alone, so that workers on
equal machines round equally. docs/performance.md has the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F

from baton_kernels.cpu.int_linear import NativeIntLinear, can_pack_integers
from baton_kernels.cpu.linear import NativeLinear, can_pack
from baton_kernels.cpu.memory import Allocate, host_memory
from baton_kernels.epilogue import finish
from baton_kernels.quantized_linear import (
    Float8Linear,
    IntLinear,
    can_group_float8,
    can_pack_int_weight,
    pack_int_weight,
)
from baton_kernels.sparse_linear import SparseLinear, can_run_sparse, is_sparse

#: Minimum compute capability with float8 matrix units.
_FLOAT8_CAPABILITY = (8, 9)


class Linear(Protocol):
    """A linear layer that is ready to run."""

    @property
    def num_in(self) -> int: ...

    @property
    def num_out(self) -> int: ...

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x [rows, num_in] -> [rows, num_out] of `out_dtype` (x's dtype or float32; default x's).

        residual [rows, num_out], of x's dtype, is added. Its memory may be reused for the result,
        so a caller that still needs it must copy it first.
        """
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """torch's own product: the twin of all other forms. weight [num_out, num_in], bias [num_out] or
    None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def num_in(self) -> int:
        return self.weight.shape[1]

    @property
    def num_out(self) -> int:
        return self.weight.shape[0]

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Linear."""
        y = F.linear(x, self.weight, self.bias)
        return finish(y, residual, out_dtype)


class FusedLinear(PlainLinear):
    """Linear layer on a GPU with a fused epilogue. The residual is added before the sum is rounded,
    in the residual's memory (torch.addmm would copy it first). float32 results, such as logits, are
    written directly, not through 16 bits. A layer with a bias adds its residual in a separate
    pass."""

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Linear."""
        weight, bias = self.weight, self.bias
        if residual is not None and bias is None and out_dtype in (None, x.dtype):
            return residual.addmm_(x, weight.t())
        # Only CUDA has 16-bit products with float32 results.
        if x.is_cuda and out_dtype == torch.float32 != x.dtype:
            y = torch.mm(x, weight.t(), out_dtype=torch.float32)
            y = y if bias is None else y.add_(bias)
            return y if residual is None else y.add_(residual)
        return finish(F.linear(x, weight, bias), residual, out_dtype)


class OneDnnLinear:
    """oneDNN with a weight reordered once: for CPUs without the native kernels."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_out, self.num_in = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Linear."""
        y = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return finish(y, residual, out_dtype)


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, allocate: Allocate = host_memory
) -> Linear:
    """The fastest form of a layer with weight [num_out, num_in] and bias [num_out] or none.

    Packed forms hold a copy of the weight: drop the original. allocate: allocates memory of the
    native form.
    """
    if weight.device.type != "cpu":
        if can_run_sparse(weight.device, weight.dtype, weight.shape) and is_sparse(weight):
            return SparseLinear(weight, bias)
        return FusedLinear(weight, bias)
    if can_pack(weight):
        return NativeLinear(weight, bias, allocate)
    if weight.dtype == torch.bfloat16 and onednn_has_bfloat16():
        return OneDnnLinear(weight, bias)
    return PlainLinear(weight, bias)


def onednn_has_bfloat16() -> bool:
    """Whether OneDnnLinear supports bfloat16 here: its weights need AVX-512 or AVX-NE-CONVERT."""
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_built and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def keeps_levels(device: torch.device, dtype: torch.dtype, bits: int, group_size: int) -> bool:
    """Whether `pack_quantized` supports such weights here, with activations of `dtype`; otherwise
    they are dequantised."""
    if device.type == "cuda":
        return dtype in (torch.bfloat16, torch.float16) and can_pack_int_weight(bits, group_size)
    is_fast = device.type == "cpu" and dtype == torch.bfloat16
    return is_fast and can_pack_integers(bits, group_size)


def keeps_float8(device: torch.device, dtype: torch.dtype, num_in: int, group_size: int) -> bool:
    """Whether `pack_float8` supports float8 weights here that have a scale per `group_size` of
    their `num_in` inputs, with activations of `dtype`; otherwise they are dequantised."""
    return can_group_float8(num_in, group_size) and has_float8(device, dtype)


def has_float8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies float8 in layers with activations of `dtype`."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    has_units = torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY
    return has_units and find_spec("triton") is not None


def pack_float8(
    codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, device: torch.device
) -> Linear:
    """The layer with the weight codes * scales on `device`: codes [num_out, num_in] float8_e4m3fn,
    scales [num_out, groups] float32, each for num_in / groups consecutive inputs.

    Activations are rounded to float8, too, with one scale per row and group.
    """
    return Float8Linear(codes.to(device).contiguous(), scales.t().to(device).contiguous(), bias)


def pack_quantized(
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    bias: torch.Tensor | None,
    device: torch.device,
    allocate: Allocate = host_memory,
) -> Linear:
    """The layer with the weight (levels - zeros) * scales on `device`. See
    baton_kernels.cpu.int_linear for shapes."""
    if device.type == "cuda":
        return IntLinear(pack_int_weight(levels, scales, zeros, bits).to(device), bias)
    return NativeIntLinear(levels, scales, zeros, bits, bias, allocate)
