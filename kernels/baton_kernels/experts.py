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
from baton_kernels.linear import Linear, PlainLinear
from baton_kernels.quantized_linear import Float8Linear, IntLinear, IntWeight


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
        dense = [x for x in linears if isinstance(x, PlainLinear)]
        coded = [x for x in linears if isinstance(x, Float8Linear)]
        whole = [x for x in linears if isinstance(x, IntLinear)]
        self.addresses: torch.Tensor | None = None
        """Addresses of the weights, [experts] int64, on their device. Set if all are plain tensors,
        or all float8 codes, or all integers of the same bits and groups."""
        self.is_aligned = False
        """Whether all addresses are multiples of 16 bytes."""
        self.scales: torch.Tensor | None = None
        """[experts, groups, num_out], for float8 codes and integers only."""
        self.integers: IntWeight | None = None
        """The first expert's weight if all are integers; its bits and runs hold for all."""
        self.zeros: torch.Tensor | None = None
        """[experts, groups, num_out] int16, for integers; None if all are symmetric."""
        self.biases: torch.Tensor | None = None
        """[experts, num_out]; None without biases."""
        is_one_kind = len(linears) in (len(dense), len(coded), len(whole))
        if is_one_kind and len({(x.weight.bits, x.weight.scales.shape) for x in whole}) <= 1:
            weights = [x.weight for x in dense] + [x.codes for x in coded]
            weights += [x.weight.levels for x in whole]
            at = [weight.data_ptr() for weight in weights]
            self.addresses = torch.tensor(at, device=weights[0].device)
            self.is_aligned = all(address % 16 == 0 for address in at)
            given = [x.bias for x in dense] + [x.bias for x in coded] + [x.bias for x in whole]
            biases = [bias for bias in given if bias is not None]
            self.biases = torch.stack(biases) if biases else None
            scales = [x.scales for x in coded] + [x.weight.scales for x in whole]
            self.scales = torch.stack(scales) if scales else None
            if whole:
                self.integers = whole[0].weight
                self.zeros = _zeros([x.weight for x in whole])

    @property
    def num_in(self) -> int:
        return self.linears[0].num_in

    @property
    def num_out(self) -> int:
        return self.linears[0].num_out


def _zeros(weights: Sequence[IntWeight]) -> torch.Tensor | None:
    """[weights, groups, num_out] int16; None if all are symmetric."""
    if all(weight.zeros is None for weight in weights):
        return None
    middle = 1 << (weights[0].bits - 1)
    return torch.stack(
        [
            torch.full_like(weight.scales, middle, dtype=torch.int16)
            if weight.zeros is None
            else weight.zeros
            for weight in weights
        ]
    )


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
