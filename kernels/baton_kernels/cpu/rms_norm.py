"""baton_kernels.rms_norm in native code."""

from __future__ import annotations

import torch

from baton_kernels.cpu.calling import NATIVE_DTYPES, STORED_NUMBERS
from baton_kernels.cpu.library import loaded
from baton_kernels.rms_norm import rms_norm as op


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the twin."""
    if x.dtype not in NATIVE_DTYPES:
        return op.twin(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    dim = x.shape[-1]
    loaded().baton_rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        weight.dtype == torch.float32,
        eps,
        out.data_ptr(),
        x.numel() // dim,
        dim,
        STORED_NUMBERS.get(x.dtype),
        torch.get_num_threads(),
    )
    return out
