"""Gated activation: y = silu(gate) * up, where silu(g) = g / (1 + exp(-g))."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton_kernels.dispatch import op


@op
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [tokens, 2 * dim], the gate first -> [tokens, dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
