"""Batch-invariant linear layers: y = x W^T (+ bias) (+ residual), each sum taken in the same order
for any number of rows.

torch's GPU products choose the order of their sums by the number of rows. Workers that promise
batch-invariant outputs use this instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton_kernels.dispatch import op
from baton_kernels.linear import PlainLinear


@op
def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """x [rows, num_in], weight [num_out, num_in], bias [num_out] and residual [rows, num_out] or
    None -> [rows, num_out] of out_dtype, rounded once."""
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return (y if residual is None else y + residual.float()).to(out_dtype)


class FixedLinear(PlainLinear):
    """See linear.Linear and this module."""

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Linear."""
        return fixed_linear(x, self.weight, self.bias, residual, out_dtype or x.dtype)
