"""Stages of a pipeline of a transformers model: which of its layers a stage runs, between the
states that it receives and those that it sends.

The model's code calls all layers in a loop. Those of other stages return their input; the first one
of this stage gets what the previous stage has sent. What the code computes before and after the
loop is of use in the first and in the last stage alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn

from engine.ranks.mesh import ALL_LAYERS, Stage
from engine.transformers.describe import Description


class LayerCut:
    """Makes a model run the layers of one stage, in each forward; at first, all layers.

    outgoing: the states [1, tokens, hidden] after the stage's last layer, once a forward has run.
    """

    def __init__(self, model: nn.Module, description: Description) -> None:
        self._description = description
        self._layers = cast(nn.ModuleList, model.get_submodule(description.container))
        self._model: Any = model
        self._forwards = [layer.forward for layer in self._layers]
        for number, layer in enumerate(self._layers):
            layer.forward = partial(self._run, number)
        self.outgoing = torch.empty(0)
        self._returns_tuples = False
        """Set by the layers that have run: at first, all do."""
        self.choose(ALL_LAYERS)

    def choose(self, stage: Stage, incoming: torch.Tensor | None = None) -> None:
        """Run the layers of this stage from now on. incoming: states [tokens, hidden] for the first
        layer of a later stage."""
        self._stage = stage
        self._own = self._description.stage_layers(stage)
        self._incoming = None if incoming is None else incoming[None]

    @property
    def first_kv_layer(self) -> int:
        """The first layer of the KV that this stage has."""
        return self._stage.layers(len(self._description.windows)).start

    def drop_others(self, stage: Stage) -> None:
        """Drop the weights of all stages but this one."""
        self.choose(stage)
        for number, layer in enumerate(self._layers):
            if number not in self._own:
                _empty(layer)
        if not stage.is_first:
            _empty(self._model.get_output_embeddings())
            embeddings = self._model.get_input_embeddings()
            like, size = embeddings.weight.new_zeros(()), embeddings.weight.shape[1]
            _empty(embeddings)
            embeddings.forward = lambda ids, *_, **__: like.new_zeros(*ids.shape, size)

    def _run(self, number: int, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if number not in self._own:
            return (hidden_states,) if self._returns_tuples else hidden_states
        if number == self._own.start and self._incoming is not None:
            hidden_states = self._incoming
        result = self._forwards[number](hidden_states, *args, **kwargs)
        self._returns_tuples = isinstance(result, tuple)
        self.outgoing = result[0] if self._returns_tuples else result
        return result


def _empty(module: nn.Module) -> None:
    """Drop a module's weights and parts."""
    module._modules.clear()
    module._parameters.clear()
    module._buffers.clear()
