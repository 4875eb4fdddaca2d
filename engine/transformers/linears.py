"""Our linear layers in a transformers model: faster on a CPU and, with native kernels, with one
order of sums, so that a row's result is bit-identical in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from baton_kernels.cpu.memory import Allocate, Arena
from baton_kernels.linear import Linear, pack_linear
from engine.transformers.describe import configs_of
from engine.transformers.states import own_weights

#: Name of `_forward_experts` in transformers' interface for experts.
_EXPERTS = "baton"
#: Attribute of an experts module that holds its packed layers.
_ATTRIBUTE = "baton_experts"


class PackedLinear(nn.Module):
    """Replaces nn.Linear. x [..., num_in] -> [..., num_out]."""

    def __init__(self, packed: Linear, weight: torch.Tensor) -> None:
        """weight: the original; only shape and dtype are kept."""
        super().__init__()
        self._packed = packed
        #: For code that reads the layer's dtype; has no data.
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises TypeError if x has another dtype than the weight."""
        if x.dtype != self.weight.dtype:
            raise TypeError(f"a linear layer of {self.weight.dtype} got {x.dtype}")
        return self._packed(x.flatten(0, -2)).view(*x.shape[:-1], -1)


class _RouterWeight(torch.Tensor):
    """A weight that its module passes to F.linear, which then runs a packed layer."""

    packed: Linear
    in_float32: torch.Tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not kwargs and isinstance(args[1], cls):
            x, weight, *bias = args
            y = weight.packed(x.flatten(0, -2)).view(*x.shape[:-1], -1)
            return y if not bias or bias[0] is None else y + bias[0]
        if func is torch.Tensor.float or (
            func is torch.Tensor.type and args[1:] == (torch.float32,)
        ):
            return args[0].in_float32
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _router_weight(weight: torch.Tensor, allocate: Allocate) -> torch.Tensor:
    """weight [experts, size], with packed layers in its dtype and in float32, which routers may ask
    for."""
    made = weight.detach().as_subclass(_RouterWeight)
    made.packed = _pack(weight, None, allocate)
    is_wide = weight.dtype == torch.float32
    made.in_float32 = made if is_wide else _router_weight(weight.detach().float(), allocate)
    return made


def pack_linears(model: PreTrainedModel) -> None:
    """Replace the model's linear layers one at a time, dropping each original. On a GPU only the
    interface for experts is set."""
    allocate = Arena().take
    is_host = model.device.type == "cpu"
    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _forward_experts)
    for config in configs_of(model):
        config._experts_implementation_internal = _EXPERTS if is_host else "grouped_mm"
    if not is_host:
        return
    unpacked = own_weights(model)
    for name, module in list(model.named_modules()):
        if name in unpacked:
            continue
        if _is_plain_linear(module):
            weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
            bias = module.bias
            _replace(model, name, PackedLinear(_pack(weight, bias, allocate), weight))
        elif hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            _pack_experts(module, allocate)
        elif _is_router(module):
            weight = module._parameters.pop("weight")
            cast(Any, module).weight = _router_weight(weight, allocate)


def _pack(weight: Any, bias: Any, allocate: Allocate) -> Linear:
    own = None if bias is None else bias.detach()
    return pack_linear(weight.detach().contiguous(), own, allocate)


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether the module computes the same as nn.Linear."""
    kind = type(module)
    if isinstance(module, Conv1D) or kind.__name__ == "FalconLinear":
        return True
    return isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward


def _is_router(module: nn.Module) -> bool:
    """Whether the module has a matrix of its own, other than embeddings and linear layers: it
    passes that to F.linear."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return False
    return not isinstance(module, nn.Embedding | nn.Linear | nn.modules.conv._ConvNd)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _pack_experts(module: Any, allocate: Allocate) -> None:
    """Pack each expert's two layers and drop their weights."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    layers = []
    for name in names:
        weights = getattr(module, name)
        biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
        layers.append(
            [
                _pack(weight.t() if module.is_transposed else weight, bias, allocate)
                for weight, bias in zip(weights, biases, strict=True)
            ]
        )
        setattr(module, name, None)
    setattr(module, _ATTRIBUTE, layers)


def _forward_experts(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """hidden [tokens, size], chosen and weights [tokens, experts per token] -> [tokens, size].

    A token's experts are summed in its own order, for any batch.
    """
    num_chosen = chosen.shape[-1]
    experts = chosen.reshape(-1)
    first, second = getattr(module, _ATTRIBUTE)
    results = hidden.new_empty(len(experts), hidden.shape[-1])
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=len(first)).tolist()
    for expert, places in enumerate(torch.split(order, counts)):
        if not len(places):
            continue
        inner = first[expert](hidden[places // num_chosen])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        result = second[expert](inner)
        # Older transformers have no such attribute.
        has_norm = getattr(module, "has_post_expert_norm", False)
        results[places] = module.post_expert_norm(result) if has_norm else result
    weighted = results * weights.reshape(-1, 1)
    return weighted.view(len(hidden), num_chosen, -1).sum(1).to(hidden.dtype)
