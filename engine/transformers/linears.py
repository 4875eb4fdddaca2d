"""Our linear layers in a transformers model: faster on a CPU and, with native kernels, with one
order of sums, so that a row's result is bit-identical in any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from engine.transformers.shared import Share
from engine.transformers.states import own_weights

#: Name of `_forward_experts` in transformers' interface for experts.
_EXPERTS = "baton"
#: Attribute of an experts module that holds its packed layers.
_ATTRIBUTE = "baton_experts"


class PackedLinear(nn.Module):
    """Replaces nn.Linear. x [..., num_in] -> [..., num_out]."""

    def __init__(self, packed: Linear, weight: torch.Tensor, share: Share) -> None:
        """packed: the rank's part. weight: the original; only shape and dtype are kept."""
        super().__init__()
        self._packed, self._share = packed, share
        #: For code that reads the layer's dtype; has no data.
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises TypeError if x has another dtype than the weight."""
        if x.dtype != self.weight.dtype:
            raise TypeError(f"a linear layer of {self.weight.dtype} got {x.dtype}")
        y = self._share.gather(self._packed(x.flatten(0, -2)), self.weight.shape[0])
        return y.view(*x.shape[:-1], -1)


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


def pack_linears(model: PreTrainedModel, share: Share) -> None:
    """Replace the model's linear layers by the rank's parts, one at a time, dropping each
    original."""
    allocate = Arena().take
    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _forward_experts)
    for config in configs_of(model):
        config._experts_implementation_internal = _EXPERTS
    unpacked = own_weights(model)
    for name, module in list(model.named_modules()):
        if name in unpacked:
            continue
        if _is_plain_linear(module):
            weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
            bias = None if module.bias is None else share.rows(module.bias)
            packed = _pack(share.rows(weight), bias, allocate)
            _replace(model, name, PackedLinear(packed, weight, share))
        elif hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            _pack_experts(module, share, allocate)
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


class _SharedExperts:
    """One linear layer of all experts: the rank's part of each."""

    def __init__(self, parts: Sequence[Linear], num_out: int, share: Share) -> None:
        self._parts, self._num_out, self._share = parts, num_out, share

    @property
    def num_experts(self) -> int:
        return len(self._parts)

    def __call__(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """x [rows, num_in], the rows of each expert side by side, counts[expert] of them -> [rows,
        num_out]."""
        part = x.new_empty(len(x), self._parts[0].num_out)
        inputs, outputs = torch.split(x, counts), torch.split(part, counts)
        for own, rows, out in zip(self._parts, inputs, outputs, strict=True):
            if len(rows):
                out.copy_(own(rows))
        return self._share.gather(part, self._num_out)


def _pack_experts(module: Any, share: Share, allocate: Allocate) -> None:
    """Pack the rank's part of each expert's two layers and drop their weights."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    layers = []
    for name in names:
        weights = getattr(module, name)
        if module.is_transposed:
            weights = weights.transpose(1, 2)
        biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
        parts = [
            _pack(share.rows(weight), None if bias is None else share.rows(bias), allocate)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        layers.append(_SharedExperts(parts, weights.shape[1], share))
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
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=first.num_experts).tolist()
    inner = first(hidden[order // num_chosen], counts)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    sorted_results = second(inner, counts)
    # Older transformers have no such attribute.
    if getattr(module, "has_post_expert_norm", False):
        sorted_results = module.post_expert_norm(sorted_results)
    results = torch.empty_like(sorted_results)
    results[order] = sorted_results
    weighted = results * weights.reshape(-1, 1)
    return weighted.view(len(hidden), num_chosen, -1).sum(1).to(hidden.dtype)
