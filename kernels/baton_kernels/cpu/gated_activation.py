"""baton_kernels.gated_activation in native code."""

from __future__ import annotations

import torch

from baton_kernels import gated_activation
from baton_kernels.cpu.calling import NATIVE_DTYPES, STORED_NUMBERS
from baton_kernels.cpu.library import loaded


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See the twin."""
    return _called("swiglu", gate_up)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See the twin."""
    return _called("geglu", gate_up)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See the twin."""
    return _called("clamped_swiglu", gate_up)


def _called(name: str, gate_up: torch.Tensor) -> torch.Tensor:
    if gate_up.dtype not in NATIVE_DTYPES or not gate_up.is_contiguous():
        twin: torch.Tensor = getattr(gated_activation, name).twin(gate_up)
        return twin
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, dim)
    getattr(loaded(), f"baton_{name}")(
        gate_up.data_ptr(),
        out.data_ptr(),
        rows,
        dim,
        STORED_NUMBERS.get(gate_up.dtype),
        torch.get_num_threads(),
    )
    return out
