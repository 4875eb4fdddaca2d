"""Quantised layers with tensors still to be read: they may be in several files."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch

from engine.quantization.config import QuantizationConfig
from engine.quantization.decode import decode, required_pieces
from engine.quantization.weight import StoredWeight

#: Dtypes of unquantised layers in a quantised checkpoint.
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
#: Tensors of static activation quantisation.
_ACTIVATION_SCALES = ("input_scale", "input_zero_point")


class PendingLayers:
    """Collects tensors and returns each layer's weight once it is complete."""

    def __init__(self, config: QuantizationConfig, layers: AbstractSet[str]) -> None:
        """layers: names of the layers that may be quantised."""
        self._config = config
        self._layers = layers
        self._pieces: dict[str, dict[str, torch.Tensor]] = {}

    def takes(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the tensor is a piece of a quantised layer."""
        layer, _, piece = name.rpartition(".")
        if layer not in self._layers or (piece == "weight" and dtype in PLAIN):
            return False
        return piece in self._required(layer)

    def is_unused(self, name: str) -> bool:
        """Whether the tensor belongs to a quantised layer but is not needed: activations are
        quantised dynamically, not with calibrated scales."""
        layer, _, piece = name.rpartition(".")
        return layer in self._layers and piece in _ACTIVATION_SCALES

    def is_bias(self, name: str) -> bool:
        """Whether the tensor is a bias of a layer that may be quantised."""
        layer, _, piece = name.rpartition(".")
        return layer in self._layers and piece == "bias"

    def add(
        self, name: str, tensor: torch.Tensor
    ) -> tuple[str, StoredWeight | torch.Tensor] | None:
        """Add a tensor; return the layer's name and weight if it was the last piece. Raises
        ValueError for pieces that do not fit."""
        layer, _, piece = name.rpartition(".")
        pieces = self._pieces.setdefault(layer, {})
        pieces[piece] = tensor
        if pieces.keys() != self._required(layer):
            return None
        return layer, decode(self._pieces.pop(layer), self._config.of(layer))

    def missing(self) -> dict[str, list[str]]:
        """Missing tensors, by incomplete layer."""
        return {
            layer: sorted(self._required(layer) - pieces.keys())
            for layer, pieces in self._pieces.items()
        }

    def _required(self, layer: str) -> frozenset[str]:
        return required_pieces(self._config.of(layer))
