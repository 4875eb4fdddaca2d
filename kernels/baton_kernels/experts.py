"""Mixtures of experts: routing, one matrix product per row and expert, and the weighted sum of the
experts' outputs.

    route:           a token's experts and their weights, from the router's logits
    grouped_linear:  y[r] = W[e(r)] x[r // repeat] for rows r of tokens x chosen experts
    headwise_linear: the same, each token through each of the layers
    combine:         out[t] = residual[t] + (sum_j weights[t, j] y[t * chosen + j] + shared[t])

A token's result depends on its own row alone; the native CPU kernels make it bit-identical in any
batch and read only the weights of chosen experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton_kernels.dispatch import op
from baton_kernels.layer import Routing
from baton_kernels.linear import Linear
from baton_kernels.stacked_weights import stack_weights


@op
def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [tokens, experts] float32 -> experts [tokens, chosen] int32, ascending, and their
    weights [tokens, chosen] float32.

    score = softmax(logits) or sigmoid(logits). The experts with the largest score + bias are chosen
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2); ties go to the lower index. With groups, only
    experts of the best groups compete: a group's rank is the sum of its group_top (1 or 2) largest
    scores. Weights are the scores, normalised if routing.is_normalised, times routing.scale.
    """
    scores = logits.sigmoid() if routing.is_sigmoid else logits.softmax(-1)
    ranked = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        groups = ranked.view(len(ranked), routing.num_groups, ranked.shape[1] // routing.num_groups)
        best = groups.topk(min(routing.group_top, groups.shape[2]), -1).values.sum(-1)
        kept = _largest(best, routing.num_chosen_groups)
        is_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, value=False)
        ranked = groups.masked_fill(is_out[..., None], float("-inf")).flatten(1)
    chosen = _largest(ranked, routing.num_chosen).sort(-1).values
    weights = scores.gather(1, chosen)
    if routing.is_normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen.int(), weights * routing.scale


def _largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest values of each row; ties go to the lower index."""
    return torch.argsort(x, dim=-1, descending=True, stable=True)[:, :count]


class GroupedLinear:
    """The same linear layer of several experts, all of one shape."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        self.weights = stack_weights(self.linears)
        """For kernels that run all experts at once; None if they are of several forms, or of one
        that no such kernel reads."""

    @property
    def num_in(self) -> int:
        return self.linears[0].num_in

    @property
    def num_out(self) -> int:
        return self.linears[0].num_out


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Rows by expert, for a GPU's grouped_linear. order [rows] int32: rows sorted by expert;
    first [experts + 1] int32: where each expert's begin; tile_ends [experts] int32: tiles of all
    experts up to each one."""

    order: torch.Tensor
    first: torch.Tensor
    tile_ends: torch.Tensor


@op
def order_rows(chosen: torch.Tensor, num_experts: int) -> RowOrder | None:  # noqa: ARG001
    """What all layers need that the same rows run through: chosen [tokens, chosen experts] int32.
    None where grouped_linear sorts rows itself."""
    return None


@op
def grouped_linear(
    x: torch.Tensor,
    chosen: torch.Tensor,
    experts: GroupedLinear,
    repeat: int,
    order: RowOrder | None = None,  # noqa: ARG001
) -> torch.Tensor:
    """Multiply each row by its expert's weight: x [rows / repeat, num_in], chosen [tokens, chosen
    experts] int32 with `rows` elements -> [rows, num_out]. order: of order_rows, if that was called
    before."""
    of_row = chosen.flatten()
    out = x.new_empty(len(of_row), experts.num_out)
    for expert in sorted(set(of_row.tolist())):
        rows = (of_row == expert).nonzero().flatten()
        out[rows] = experts.linears[expert](x[rows // repeat])
    return out


@op
def headwise_linear(x: torch.Tensor, layers: GroupedLinear) -> torch.Tensor:
    """x [tokens, layers, num_in], each [:, i] by layer i -> [tokens, layers, num_out]."""
    tokens, heads, num_in = x.shape
    head = torch.arange(heads, dtype=torch.int32, device=x.device).repeat(tokens)
    return grouped_linear(x.reshape(-1, num_in), head, layers, 1).view(tokens, heads, -1)


@op
def combine(
    parts: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Sum the experts' outputs: parts [tokens * chosen, dim], weights [tokens, chosen] float32,
    shared and residual [tokens, dim] or None -> [tokens, dim]. Sums are float32, in the order of
    experts."""
    tokens, chosen = weights.shape
    wide = parts.float().view(tokens, chosen, parts.shape[1])
    total = wide[:, 0] * weights[:, :1]
    for i in range(1, chosen):
        total = total + wide[:, i] * weights[:, i : i + 1]
    for term in (shared, residual):
        if term is not None:
            total = total + term.float()
    return total.to(parts.dtype)
