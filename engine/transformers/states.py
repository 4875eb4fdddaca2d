"""Layers of a transformers model with a state (Mamba, gated delta rule, short convolutions): their
own code runs them from the sequences' states: one sequence after the other, and those with one new
token in one call, see `most_rows`.

A state is the last inputs of a convolution and, except for short convolutions, a recurrent state.
The code reads and writes it through a cache object, which we provide. Most code continues from a
state with several tokens at once; Mamba 1 does so only at the beginning of a sequence, and
otherwise runs token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Protocol, cast

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
#: Rows of one call that are tried.
_MOST_ROWS = 8
#: Names of these kinds of layers in configs.
STATE_LAYER_TYPES = frozenset({"conv", "hybrid", "linear_attention"})


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

    def read(self, elements: torch.Tensor, dtype: torch.dtype) -> LayerCache:
        """The cache of sequences with these states [sequences, num_elements], which belong to it
        from now on. Convolution inputs have the model's dtype, recurrent states float32."""
        num_conv, sequences = prod(self.conv), len(elements)
        conv = elements[:, :num_conv].reshape(sequences, *self.conv).to(dtype)
        if not self.recurrent:
            return LayerCache(conv)
        # Products of vectors at another alignment may have other bits.
        recurrent = elements[:, num_conv:].clone(memory_format=torch.contiguous_format)
        return LayerCache(conv, recurrent.view(sequences, *self.recurrent))

    def elements(self, cache: LayerCache) -> torch.Tensor:
        """Inverse of `read`."""
        parts = (x.flatten(1).float() for x in (cache.conv, cache.recurrent) if x is not None)
        return torch.cat(tuple(parts), dim=1)


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
        self.forward: Callable[..., torch.Tensor] = module.forward
        self._kind = _KINDS[type(module).__name__]

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """hidden_states [1, tokens, size] -> the same shape. A token's result depends on its own
        sequence alone."""
        parts = []
        for states in self._holder().states:
            end = states.first_token + states.num_tokens
            parts.append(self._advance(hidden_states[:, states.first_token : end], states))
        return torch.cat(parts, dim=1)

    def _advance(self, hidden: torch.Tensor, states: SequenceStates) -> torch.Tensor:
        cache, is_new = LayerCache(), states.before is None
        of_layer = states.places.select(1, self._index - states.first_layer)
        if states.before is not None:
            cache = self._layer.read(of_layer.index_select(0, states.before), hidden.dtype)
        # Of several sequences each has a token.
        rows = hidden.view(states.num_sequences, -1, hidden.shape[-1])
        pieces = [rows] if is_new or self._kind.goes_on else torch.split(rows, 1, dim=1)
        outputs = [self.forward(piece, cache=cache) for piece in pieces]
        if states.after is not None:
            of_layer.index_copy_(0, states.after, self._layer.elements(cache))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).view_as(hidden)


def most_rows(
    model: nn.Module, layers: tuple[StateLayer, ...], hidden_size: int, dtype: torch.dtype
) -> int:
    """The largest number of sequences with one new token that each layer may be called with at
    once.

    On a CPU such a call gives a sequence the bits that it has alone for every number of rows up to
    the result, which is tried here: torch may compute products of other shapes otherwise, and the
    rest of a vector. All ranks of a tensor-parallel group call this at once, and may find different
    numbers.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_MOST_ROWS, 1, hidden_size, generator=generator).to(dtype)
    # One of each kind: the others differ in their weights alone.
    kinds = {
        (type(model.get_submodule(layer.module)), layer.conv, layer.recurrent): layer
        for layer in layers
    }
    forwards = (cast(Any, model.get_submodule(x.module)).forward.forward for x in kinds.values())
    with torch.inference_mode():
        found = map(partial(_most_rows, hidden), kinds.values(), forwards)
        return min(found, default=1)


def _most_rows(
    hidden: torch.Tensor, layer: StateLayer, forward: Callable[..., torch.Tensor]
) -> int:
    """Of one layer. hidden: inputs of each row."""
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(_MOST_ROWS, layer.num_elements, generator=generator)

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        cache = layer.read(given[rows].clone(), hidden.dtype)
        return forward(hidden[rows], cache=cache), layer.elements(cache)

    alone = [run(slice(row, row + 1)) for row in range(_MOST_ROWS)]
    outputs, elements = (torch.cat(parts) for parts in zip(*alone, strict=True))
    found = 1
    # Ranks exchange results within a layer, so all make the same calls to the end.
    for num_rows in range(2, _MOST_ROWS + 1):
        output, after = run(slice(num_rows))
        pairs = ((output, outputs), (after, elements))
        is_same = all(torch.equal(got, wanted[:num_rows]) for got, wanted in pairs)
        found += is_same and found == num_rows - 1
    return found


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
