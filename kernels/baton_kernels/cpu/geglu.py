"""baton_kernels.geglu in native code."""

from __future__ import annotations

import torch

from baton_kernels.cpu.calling import is_native, stored_number
from baton_kernels.cpu.library import loaded
from baton_kernels.geglu import geglu as op


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See the twin."""
    if not is_native(gate_up.dtype) or not gate_up.is_contiguous():
        return op.twin(gate_up)
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, dim)
    loaded().baton_geglu(
        gate_up.data_ptr(),
        out.data_ptr(),
        rows,
        dim,
        stored_number(gate_up.dtype),
        torch.get_num_threads(),
    )
    return out
