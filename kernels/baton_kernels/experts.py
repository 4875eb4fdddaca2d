"""Mixtures of experts: which of them a token goes to, products by each row's own expert, and the
weighted sum of what they give.

    route:           a token's experts and their weights, from the router's logits
    grouped_linear:  y[r] = W[e(r)] x[r // repeat] for rows r of tokens x chosen experts
    combine:         out[t] = residual[t] + (sum_j weights[t, j] y[t * chosen + j] + shared[t])

A token's result depends on its own row alone. On a CPU with the native kernels it is the same to
the bit in any batch, and of the experts' weights only those are read that some row goes to.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    score = softmax(logits) or sigmoid(logits). The experts with the largest score + bias are
    chosen (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), of equal ones the first; where they are
    in groups, from those groups whose two largest (or one) add up to most. Weights are their
    scores, divided by their sum if routing says so, times its scale.
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
    """Indices of the `count` largest of each row; of equal ones the first."""
    return torch.argsort(x, dim=-1, descending=True, stable=True)[:, :count]


class GroupedLinear:
    """A linear layer of each of several experts, all of one shape."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        dense = [x for x in linears if isinstance(x, PlainLinear)]
        coded = [x for x in linears if isinstance(x, Float8Linear)]
        whole = [x for x in linears if isinstance(x, IntLinear)]
        self.addresses: torch.Tensor | None = None
        """Of the weights [experts] int64, on their device, where all are plain tensors, or all are
        codes of float8, or all are integers of as many bits in as many groups."""
        self.scales: torch.Tensor | None = None
        """[experts, groups, num_out], of codes and integers alone."""
        self.integers: IntWeight | None = None
        """Of the first expert, where all are integers: bits and runs are those of all."""
        self.zeros: torch.Tensor | None = None
        """[experts, groups, num_out] int16, of integers; None where all are in the middle."""
        self.biases: torch.Tensor | None = None
        """[experts, num_out], beside them; None if there are none."""
        is_one_kind = len(linears) in (len(dense), len(coded), len(whole))
        if is_one_kind and len({(x.weight.bits, x.weight.scales.shape) for x in whole}) <= 1:
            weights = [x.weight for x in dense] + [x.codes for x in coded]
            weights += [x.weight.levels for x in whole]
            at = [weight.data_ptr() for weight in weights]
            self.addresses = torch.tensor(at, device=weights[0].device)
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
    """[weights, groups, num_out] int16; None where all are in the middle."""
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


@op
def grouped_linear(
    x: torch.Tensor, chosen: torch.Tensor, experts: GroupedLinear, repeat: int
) -> torch.Tensor:
    """x [rows / repeat, num_in], chosen [tokens, chosen experts] int32, which are `rows` in all ->
    [rows, num_out]."""
    of_row = chosen.flatten()
    out = x.new_empty(len(of_row), experts.num_out)
    for expert in sorted(set(of_row.tolist())):
        rows = (of_row == expert).nonzero().flatten()
        out[rows] = experts.linears[expert](x[rows // repeat])
    return out


@op
def combine(
    parts: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """parts [tokens * chosen, dim], weights [tokens, chosen] float32, shared and residual [tokens,
    dim] or none -> [tokens, dim]. Sums are float32, in the order of experts."""
    tokens, chosen = weights.shape
    wide = parts.float().view(tokens, chosen, parts.shape[1])
    total = wide[:, 0] * weights[:, :1]
    for i in range(1, chosen):
        total = total + wide[:, i] * weights[:, i : i + 1]
    for term in (shared, residual):
        if term is not None:
            total = total + term.float()
    return total.to(parts.dtype)
