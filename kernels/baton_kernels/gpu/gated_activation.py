"""Gated activations: y = f(gate) * up: see the twins.

gate_up [tokens, 2 * dim], the gate first -> [tokens, dim]. f(gate) and the factor from up are
rounded to the dtype before they are multiplied, as in the twins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _gated(
    gate_up_ptr, y_ptr, dim, IS_GELU: tl.constexpr, IS_CLAMPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < dim
    gate = tl.load(gate_up_ptr + row * 2 * dim + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * dim + dim + dims, mask=inside, other=0.0)
    if IS_CLAMPED:
        gate = tl.minimum(gate, 7.0)
        limited = tl.minimum(tl.maximum(up.to(tl.float32), -7.0), 7.0)
        up = (limited + 1.0).to(up.dtype)
        power = tl.exp(-1.702 * gate)
    elif IS_GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # (1 + tanh(x)) / 2 is the sigmoid of 2 x.
        power = tl.exp(-2.0 * inner)
    else:
        power = tl.exp(-gate)
    activated = (gate / (1.0 + power)).to(up.dtype)
    y = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(y_ptr + row * dim + dims, y.to(up.dtype), mask=inside)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See the twin. gate_up must be contiguous."""
    return _launched(gate_up)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See the twin. gate_up must be contiguous."""
    return _launched(gate_up, is_gelu=True)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See the twin. gate_up must be contiguous."""
    return _launched(gate_up, is_clamped=True)


def _launched(
    gate_up: torch.Tensor, *, is_gelu: bool = False, is_clamped: bool = False
) -> torch.Tensor:
    if not gate_up.is_contiguous():
        raise ValueError("gate_up is not contiguous")
    num_tokens, dim = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(num_tokens, dim, dtype=gate_up.dtype, device=gate_up.device)
    _gated[(num_tokens, triton.cdiv(dim, BLOCK))](
        gate_up, y, dim, IS_GELU=is_gelu, IS_CLAMPED=is_clamped, BLOCK=BLOCK, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return y
