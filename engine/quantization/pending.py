"""Quantised layers with tensors still to be read: they may be in several files."""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet

import torch

from engine.quantization.config import QuantizationConfig
from engine.quantization.decode import decode, required_pieces, usual_piece
from engine.quantization.weight import StoredWeight

#: Dtypes of unquantised layers in a quantised checkpoint.
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
#: Tensors of static activation quantisation, by quantised layer.
_ACTIVATION_SCALES = ("input_scale", "input_zero_point", "activation_scale", "output_scale")
#: Calibrated scales of an attention layer's KV and products, which stand beside its layers or in
#: those of keys and values.
_KV_SCALE = re.compile(r"\.self_attn(\.[kv]_proj)?\.(q|k|v|prob|prob_output)_scale$")


class PendingLayers:
    """Collects tensors and returns each layer's weight once it is complete."""

    def __init__(self, config: QuantizationConfig, layers: AbstractSet[str]) -> None:
        """layers: names of the layers that may be quantised."""
        self._config = config
        self._layers = layers
        self._pieces: dict[str, dict[str, torch.Tensor]] = {}

    def takes(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the tensor is a piece of a quantised layer."""
        layer, piece = self._parts(name)
        if layer not in self._layers or (piece == "weight" and dtype in PLAIN):
            return False
        return piece in self._required(layer)

    def is_unused(self, name: str) -> bool:
        """Whether the tensor is a calibrated scale of activations or KV, which are not needed: each
        row that is rounded to 8 bits has a scale of its own, of its largest element. So weights
        alone make the result, and a row outside the calibrated range is not cut off."""
        layer, _, piece = name.rpartition(".")
        of_activations = layer in self._layers and piece in _ACTIVATION_SCALES
        return of_activations or _KV_SCALE.search(name) is not None

    def is_bias(self, name: str) -> bool:
        """Whether the tensor is a bias of a layer that may be quantised."""
        layer, _, piece = name.rpartition(".")
        return layer in self._layers and piece == "bias"

    def add(
        self, name: str, tensor: torch.Tensor
    ) -> tuple[str, StoredWeight | torch.Tensor] | None:
        """Add a tensor; return the layer's name and weight if it was the last piece. Raises
        ValueError for pieces that do not fit."""
        layer, piece = self._parts(name)
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

    def _parts(self, name: str) -> tuple[str, str]:
        """A tensor's layer and piece."""
        layer, _, piece = name.rpartition(".")
        return layer, usual_piece(piece, self._config.of(layer))

    def _required(self, layer: str) -> frozenset[str]:
        return required_pieces(self._config.of(layer))
