"""Gated activations: y = f(gate) * up.

swiglu: f(g) = silu(g) = g / (1 + exp(-g))
geglu: f(g) = gelu(g), tanh form: g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))
clamped_swiglu (gpt-oss): y = f(min(gate, LIMIT)) * (max(-LIMIT, min(up, LIMIT)) + 1) with
    f(g) = g / (1 + exp(-ALPHA g))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton_kernels.dispatch import op

#: Constants of clamped_swiglu, repeated in its native and Triton kernels.
ALPHA, LIMIT = 1.702, 7.0


@op
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [tokens, 2 * dim], the gate first -> [tokens, dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@op
def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [tokens, 2 * dim], the gate first -> [tokens, dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@op
def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [tokens, 2 * dim], the gate first -> [tokens, dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=LIMIT)
    return (gate * torch.sigmoid(gate * ALPHA)) * (up.clamp(-LIMIT, LIMIT) + 1)
