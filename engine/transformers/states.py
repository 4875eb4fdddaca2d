"""Layers of a transformers model with a state (Mamba, gated delta rule, short convolutions): their
own code runs them, one sequence after the other, each from its state.

A state is the last inputs of a convolution and, except for short convolutions, a recurrent state.
The code reads and writes it through a cache object, which we provide. Most code continues from a
state with several tokens at once; Mamba 1 does so only at the beginning of a sequence, and
otherwise runs token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from engine.torch.sequence_states import SequenceStates


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a class of layers is called. goes_on: continues from a state with several tokens at once.
    own_weights: linear layers with weights that its code reads directly."""

    goes_on: bool = True
    own_weights: tuple[str, ...] = ()


_MAMBA_1 = _Kind(goes_on=False, own_weights=("dt_proj",))
#: By class of the layer; each has passed a model's `check`.
_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "BambaMixer": _Kind(),
        "FalconH1Mixer": _Kind(),
        "GraniteMoeHybridMambaLayer": _Kind(),
        "JambaMambaMixer": _MAMBA_1,
        "LaraMiniGatedDeltaNet": _Kind(),
        "Lfm2MoeShortConv": _Kind(),
        "Lfm2ShortConv": _Kind(),
        "OlmoHybridGatedDeltaNet": _Kind(),
        "Qwen3NextGatedDeltaNet": _Kind(),
        "Qwen3_5GatedDeltaNet": _Kind(),
        "Qwen3_5MoeGatedDeltaNet": _Kind(),
    }
)
#: Names of these kinds of layers in configs.
STATE_LAYER_TYPES = frozenset({"conv", "hybrid", "linear_attention"})


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A layer with a state. module: its name within the model; conv, recurrent: shapes of the two
    tensors of one sequence's state; recurrent is empty if the kind has none."""

    module: str
    conv: tuple[int, ...]
    recurrent: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.conv) + (prod(self.recurrent) if self.recurrent else 0)


class LayerCache:
    """Stands in for transformers' cache in a layer's code: one sequence's state in one layer, with
    mutable tensors."""

    def __init__(
        self, conv: torch.Tensor | None = None, recurrent: torch.Tensor | None = None
    ) -> None:
        """[1, ...] each; None before the first token, and if the kind has none."""
        self.conv, self.recurrent = conv, recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:  # noqa: ARG002
        """As transformers' Cache."""
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:  # noqa: ARG002
        """As transformers' Cache."""
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        """As transformers' Cache."""
        return False

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,  # noqa: ARG002
        conv_kernel_size: int,
    ) -> torch.Tensor:
        """As transformers' Cache: append the new inputs and keep the last ones."""
        if self.conv is None:
            missing = max(0, conv_kernel_size - conv_states.shape[-1])
            whole = F.pad(conv_states, (missing, 0))
        else:
            whole = torch.cat((self.conv, conv_states), dim=-1)
        self.conv = whole[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(
        self,
        recurrent_states: torch.Tensor,
        layer_idx: int,  # noqa: ARG002
    ) -> torch.Tensor:
        """As transformers' Cache."""
        self.recurrent = recurrent_states
        return recurrent_states


class StatesOfStep(Protocol):
    """Access to the sequences of the current step, for layers."""

    @property
    def states(self) -> tuple[SequenceStates, ...]: ...


def state_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's layers with a state, by name, in order."""
    return ((n, m) for n, m in model.named_modules() if type(m).__name__ in _KINDS)


def own_weights(model: nn.Module) -> frozenset[str]:
    """Names of linear layers with weights that a state layer's code reads directly."""
    return frozenset(
        f"{name}.{own}"
        for name, module in state_modules(model)
        for own in _KINDS[type(module).__name__].own_weights
    )


@contextmanager
def watched(model: nn.Module) -> Iterator[Mapping[str, LayerCache]]:
    """Record the cache of each state layer, by the layer's name, in a forward of one new
    sequence."""
    caches: dict[str, LayerCache] = {}

    def watch(name: str, module: Any) -> None:
        forward = module.forward

        def run(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            caches[name] = LayerCache()
            return forward(hidden_states, cache=caches[name])

        module.forward = run

    for name, module in state_modules(model):
        watch(name, module)
    try:
        yield caches
    finally:
        for _, module in state_modules(model):
            vars(module).pop("forward")


def layer_of(name: str, cache: LayerCache) -> StateLayer:
    """Describe a layer from its filled cache."""
    conv = () if cache.conv is None else tuple(cache.conv.shape[1:])
    recurrent = () if cache.recurrent is None else tuple(cache.recurrent.shape[1:])
    return StateLayer(name, conv, recurrent)


class _LayerStates:
    """Replaces the forward of a layer with a state."""

    def __init__(
        self, holder: Callable[[], StatesOfStep], index: int, layer: StateLayer, module: Any
    ) -> None:
        """index: among the layers with a state."""
        self._holder, self._index, self._layer = holder, index, layer
        self._forward: Callable[..., torch.Tensor] = module.forward
        self._kind = _KINDS[type(module).__name__]

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """hidden_states [1, tokens, size] -> the same shape. A token's result depends on its own
        sequence alone."""
        parts = []
        for sequence in self._holder().states:
            end = sequence.first_token + sequence.num_tokens
            parts.append(self._advance(hidden_states[:, sequence.first_token : end], sequence))
        return torch.cat(parts, dim=1)

    def _advance(self, hidden: torch.Tensor, sequence: SequenceStates) -> torch.Tensor:
        cache, is_new = LayerCache(), sequence.before is None
        index = self._index - sequence.first_layer
        if sequence.before is not None:
            cache = self._read(sequence.before[index], hidden.dtype)
        pieces = [hidden] if is_new or self._kind.goes_on else torch.split(hidden, 1, dim=1)
        outputs = [self._forward(piece, cache=cache) for piece in pieces]
        self._write(cache, sequence.after[index])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _read(self, elements: torch.Tensor, dtype: torch.dtype) -> LayerCache:
        """Copy the state, because the code may modify it. Convolution inputs have the model's
        dtype, recurrent states float32."""
        num_conv = prod(self._layer.conv)
        conv = elements[:num_conv].view(1, *self._layer.conv).to(dtype, copy=True)
        if not self._layer.recurrent:
            return LayerCache(conv)
        return LayerCache(conv, elements[num_conv:].view(1, *self._layer.recurrent).clone())

    def _write(self, cache: LayerCache, elements: torch.Tensor) -> None:
        num_conv = prod(self._layer.conv)
        if cache.conv is not None:
            elements[:num_conv].view(self._layer.conv).copy_(cache.conv[0])
        if cache.recurrent is not None:
            elements[num_conv:].view(self._layer.recurrent).copy_(cache.recurrent[0])


def install(
    model: nn.Module, layers: tuple[StateLayer, ...], holder: Callable[[], StatesOfStep]
) -> None:
    """Make the state layers read and write the states of the step returned by `holder`."""
    for index, layer in enumerate(layers):
        module: Any = model.get_submodule(layer.module)
        module.forward = _LayerStates(holder, index, layer, module)


@contextmanager
def removed(model: nn.Module) -> Iterator[None]:
    """Restore the layers' own forward within the context."""
    taken = [
        (module, vars(module).pop("forward"))
        for _, module in state_modules(model)
        if "forward" in vars(module)
    ]
    try:
        yield
    finally:
        for module, forward in taken:
            module.forward = forward
