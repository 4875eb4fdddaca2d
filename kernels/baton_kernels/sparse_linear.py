"""Linear layers whose weights are 2:4 sparse, on GPUs that multiply half of them: y = x W^T (+
bias) (+ residual).

Of each four inputs that follow each other an output has two weights at most. torch compresses them
to those two and their places, 9/16 of the bytes in 16 bits, and multiplies by cuSPARSELt or
CUTLASS. The twin is the dense product: zeros add nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton_kernels.epilogue import finish

_LEAST_CAPABILITY = (8, 0)
#: What both libraries want outputs and inputs to be multiples of, in 16 bits.
_TILE = (32, 64)


def can_run_sparse(device: torch.device, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether SparseLinear is for a weight of this `shape` [num_out, num_in], if it is sparse."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    is_whole = all(size % least == 0 for size, least in zip(shape, _TILE, strict=True))
    return is_whole and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def is_sparse(weight: torch.Tensor) -> bool:
    """Whether a weight [num_out, num_in], num_in a multiple of 4, is 2:4 sparse."""
    return bool(((weight != 0).view(-1, 4).sum(-1) <= 2).all())


class SparseLinear:
    """baton_kernels.linear.Linear of a weight that `can_run_sparse` and `is_sparse` take."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_out, self.num_in = weight.shape
        self._weight = torch.sparse.to_sparse_semi_structured(weight)
        self._bias = bias

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Linear."""
        return finish(F.linear(x, self._weight, self._bias), residual, out_dtype)
