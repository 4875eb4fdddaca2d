"""Gated activations: y = f(gate) * up.

swiglu: f(g) = silu(g) = g / (1 + exp(-g))
geglu: f(g) = gelu(g), taken by tanh: g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton_kernels.dispatch import op


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
