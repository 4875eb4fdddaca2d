"""Convolutions of layers with a state, on a CPU below AVX-512: computed in float32.

oneDNN has no fast code there for 16 bits: a decode step's convolution of 4,096 channels takes 20 ms
in bfloat16, and 0.3 ms in float32 with the conversions, on one core. Both add up in float32 and
round once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from engine.transformers.states import state_modules

_WIDENED = frozenset({torch.bfloat16, torch.float16})
#: Views in which transformers' code passes a weight to F.conv1d.
_VIEWS = frozenset({torch.Tensor.squeeze, torch.Tensor.unsqueeze, torch.Tensor.detach})


class _WideWeight(torch.Tensor):
    """A weight with which F.conv1d computes in float32."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _VIEWS:
                return func(*args, **(kwargs or {})).as_subclass(cls)
            if func is not F.conv1d:
                return func(*args, **(kwargs or {}))
            wide = {name: _widened(value) for name, value in (kwargs or {}).items()}
            return func(*map(_widened, args), **wide).to(args[0].dtype)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) else value


def widen_convolutions(model: nn.Module) -> None:
    """Have the model's state layers convolve in float32 where this CPU is slow in their dtype. The
    weights are no parameters any more, as those of packed linear layers."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return
    for _, layer in state_modules(model):
        for module in layer.modules():
            if isinstance(module, nn.Conv1d) and module.weight.dtype in _WIDENED:
                weight = module._parameters.pop("weight")
                cast(Any, module).weight = (
                    cast(torch.Tensor, weight).detach().as_subclass(_WideWeight)
                )
