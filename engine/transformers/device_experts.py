"""A GPU's kernels for experts in a transformers model: one launch for all experts of a product,
without a count on the host, so that graphs hold it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from baton_kernels.experts import GroupedLinear, grouped_linear, order_rows
from baton_kernels.linear import PlainLinear
from engine.transformers.describe import configs_of

#: Name of `_forward` in transformers' interface for experts.
_NAME = "baton_device"
#: Attribute of an experts module that holds its two layers.
_ATTRIBUTE = "baton_device_experts"


def are_experts(module: nn.Module) -> bool:
    """Whether a module is called through transformers' interface for experts."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def reads_them(model: nn.Module) -> bool:
    """Whether the kernels read the weights of all experts of a model where they are: not [in, out]
    ones."""
    return not any(are_experts(m) and m.is_transposed for m in model.modules())


def use_kernels(model: PreTrainedModel) -> None:
    """Make the model compute its experts by these kernels; by torch's grouped product if they do
    not read its weights."""
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    name = _NAME if reads_them(model) else "grouped_mm"
    for config in configs_of(model):
        config._experts_implementation_internal = name
    for module in model.modules():
        if name == _NAME and are_experts(module):
            setattr(module, _ATTRIBUTE, tuple(map(_grouped, _layers(module))))


def _layers(module: Any) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Weights [experts, num_out, num_in] and biases [experts, num_out] of the two products."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return [
        (getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None)
        for name in names
    ]


def _grouped(layer: tuple[torch.Tensor, torch.Tensor | None]) -> GroupedLinear:
    weights, biases = layer
    own = [None] * len(weights) if biases is None else biases.detach()
    pairs = zip(weights.detach(), own, strict=True)
    return GroupedLinear([PlainLinear(weight, bias) for weight, bias in pairs])


def _forward(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """hidden [tokens, size], chosen and weights [tokens, experts per token] -> [tokens, size].

    A token's experts are summed in its own order, for any batch.
    """
    num_chosen = chosen.shape[-1]
    experts = chosen.to(torch.int32)
    first, second = getattr(module, _ATTRIBUTE)
    order = order_rows(experts, len(first.linears))
    inner = grouped_linear(hidden, experts, first, num_chosen, order)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    results = grouped_linear(inner, experts, second, 1, order)
    # Older transformers have no such attribute.
    if getattr(module, "has_post_expert_norm", False):
        results = module.post_expert_norm(results)
    weighted = results * weights.reshape(-1, 1)
    return weighted.view(len(hidden), num_chosen, -1).sum(1).to(hidden.dtype)
