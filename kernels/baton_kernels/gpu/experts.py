"""Grouped linear layers, y[r] = W[e(r)] x[r // repeat]: see the twin. Each form of weights has a
kernel in a file of its own; expert_tiles.py is what they share."""

from __future__ import annotations

from typing import Any

import torch
import triton

from baton_kernels.experts import GroupedLinear, RowOrder
from baton_kernels.experts import grouped_linear as grouped_op
from baton_kernels.experts import headwise_linear as headwise_op
from baton_kernels.gpu.expert_tiles import Tiles
from baton_kernels.gpu.grouped_integers import run_integers
from baton_kernels.gpu.grouped_mxfp4 import run_mxfp4
from baton_kernels.gpu.grouped_plain import run_float8, run_plain
from baton_kernels.gpu.routing import combine, order_rows, route, tile_rows_for
from baton_kernels.stacked_weights import Float8Stack, IntStack, Mxfp4Stack, PlainStack

__all__ = ["combine", "grouped_linear", "headwise_linear", "order_rows", "route"]

#: Launches the kernel of each form of weights.
_RUNS: dict[type, Any] = {
    PlainStack: run_plain,
    Float8Stack: run_float8,
    IntStack: run_integers,
    Mxfp4Stack: run_mxfp4,
}


def grouped_linear(
    x: torch.Tensor,
    chosen: torch.Tensor,
    experts: GroupedLinear,
    repeat: int,
    order: RowOrder | None = None,
) -> torch.Tensor:
    """See the twin, which runs mixed kinds of experts, and weights at odd addresses."""
    if experts.weights is None or not experts.weights.is_aligned:
        return grouped_op.twin(x, chosen, experts, repeat)
    num_experts, num_rows = len(experts.linears), chosen.numel()
    tile_rows = tile_rows_for(num_rows, num_experts)
    most_tiles = triton.cdiv(num_rows, tile_rows) + min(num_experts, num_rows)
    order = order or order_rows(chosen, num_experts)
    return _launch(x, Tiles(experts, num_rows, repeat, order, most_tiles))


def headwise_linear(x: torch.Tensor, layers: GroupedLinear) -> torch.Tensor:
    """See the twin. Rows are where they are by rule: nothing is sorted."""
    if layers.weights is None or not layers.weights.is_aligned:
        return headwise_op.twin(x, layers)
    tokens, heads, num_in = x.shape
    num_tiles = heads * triton.cdiv(tokens, tile_rows_for(tokens * heads, heads))
    rows = x.reshape(-1, num_in)
    return _launch(rows, Tiles(layers, len(rows), 1, None, num_tiles)).view(tokens, heads, -1)


def _launch(x: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    x, weights = x.contiguous(), tiles.experts.weights
    y = x.new_empty(tiles.num_rows, tiles.experts.num_out)
    if tiles.num_rows:
        _RUNS[type(weights)](x, y, weights, tiles)
    return y
