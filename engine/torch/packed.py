"""A decoder's parameters in executable form: each linear layer is packed once, for its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.errors import UnsupportedModel
from baton_kernels.cpu.memory import Allocate, Arena
from baton_kernels.fixed_linear import FixedLinear
from baton_kernels.layer import Layer, Norm
from baton_kernels.linear import Linear, pack_float8, pack_linear, pack_quantized
from engine.quantization.weight import Float8Weight, StoredWeight, stack
from engine.torch.parameters import DenseLayer, Parameters, Vector
from engine.torch.parameters import Linear as DenseLinear

PackedLayer = Layer[Linear, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PackedParameters:
    """See Parameters. With tied embeddings, lm_head may be a packed copy of them."""

    embeddings: torch.Tensor
    layers: tuple[PackedLayer, ...]
    norm: Norm[torch.Tensor]
    lm_head: Linear


def pack_parameters(
    parameters: Parameters,
    quantized: dict[str, StoredWeight],
    *,
    batch_invariant: bool = False,
) -> PackedParameters:
    """Pack layer by layer. `quantized`: weights that are not in `parameters`, by the checkpoint's
    names.

    Both are emptied on the way, so that no weight is in memory twice. Linear layers move to the
    device of the norms; native CPU ones share an arena. batch_invariant: unquantised layers give
    each row the same bits in any batch, as native CPU layers always do.
    """
    device = parameters.norm.weight.numbers.device
    packing = Packing(device, quantized, is_fixed=batch_invariant and device.type != "cpu")
    layers: list[PackedLayer] = []
    while parameters.layers:
        layers.append(packing.layer(parameters.layers.pop(0)))
    return PackedParameters(
        parameters.embeddings,
        tuple(layers),
        packing.norm(parameters.norm),
        packing.linear(parameters.lm_head),
    )


class Packing:
    """Packs layers and linear layers one at a time. device: the target device; quantized: see
    pack_parameters; is_fixed: use FixedLinear."""

    def __init__(
        self, device: torch.device, quantized: dict[str, StoredWeight], *, is_fixed: bool
    ) -> None:
        self._device = device
        self._is_fixed = is_fixed
        self._quantized = quantized
        self._allocate = Arena().take

    def layer(self, layer: DenseLayer) -> PackedLayer:
        """Raises UnsupportedModel."""
        return layer.map(self.linear, _numbers)

    def norm(self, norm: Norm[Vector]) -> Norm[torch.Tensor]:
        """The norm on the target device."""
        return norm.map(_numbers)

    def linear(self, linear: DenseLinear) -> Linear:
        """Raises UnsupportedModel."""
        device, names, quantized = self._device, linear.spec.names, self._quantized
        bias = None if linear.bias is None else linear.bias.to(device)
        kept = [quantized.pop(name) for name in names if name in quantized]
        if not kept:
            weight = linear.weight.to(device)
            if linear.spec.is_transposed:
                weight = weight.t().contiguous()
            if self._is_fixed:
                return FixedLinear(weight, bias)
            return pack_linear(weight, bias, self._allocate)
        if len(kept) < len(names):
            raise UnsupportedModel(f"of {list(names)} some are quantised and some are not")
        return _pack_quantized(stack(kept), bias, device, self._allocate)


def _numbers(vector: Vector) -> torch.Tensor:
    return vector.numbers


def _pack_quantized(
    weight: StoredWeight, bias: torch.Tensor | None, device: torch.device, allocate: Allocate
) -> Linear:
    if isinstance(weight, Float8Weight):
        return pack_float8(weight.codes, weight.scales, bias, device)
    levels, scales, zeros = weight.levels, weight.scales, weight.zeros
    return pack_quantized(levels, scales, zeros, weight.bits, bias, device, allocate)
