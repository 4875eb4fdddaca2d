"""Linear layers with 2:4 sparse weights, on GPUs with sparse matrix units: y = x W^T (+ bias) (+
residual).

Each output has at most two nonzero weights in each four consecutive inputs. torch stores those two
and their positions (9/16 of the bytes in 16 bits) and multiplies by cuSPARSELt or CUTLASS. The twin
is the dense product with zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton_kernels.epilogue import finish

_LEAST_CAPABILITY = (8, 0)
#: Both libraries need multiples of this many outputs and inputs in 16 bits.
_TILE = (32, 64)


def can_run_sparse(device: torch.device, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether SparseLinear supports a sparse weight of `shape` [num_out, num_in]."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    is_whole = all(size % least == 0 for size, least in zip(shape, _TILE, strict=True))
    return is_whole and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def is_sparse(weight: torch.Tensor) -> bool:
    """Whether a weight [num_out, num_in], num_in a multiple of 4, is 2:4 sparse."""
    return bool(((weight != 0).view(-1, 4).sum(-1) <= 2).all())


class SparseLinear:
    """Linear layer (baton_kernels.linear.Linear) with a weight for which `can_run_sparse` and
    `is_sparse` hold."""

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
