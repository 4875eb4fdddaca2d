"""A decoder's parameters in executable form: each linear layer is packed once, for its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from baton_kernels.cpu.memory import Allocate, Arena
from baton_kernels.fixed_linear import FixedLinear
from baton_kernels.layer import Layer, Norm
from baton_kernels.linear import Linear, PlainLinear, pack_float8, pack_linear, pack_quantized
from baton_kernels.mxfp4_linear import pack_mxfp4
from engine.quantization.weight import Float8Weight, Mxfp4Weight, StoredWeight, stack
from engine.torch.parameters import DenseLayer, Parameters, Vector
from engine.torch.parameters import Linear as DenseLinear

PackedLayer = Layer[Linear, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PackedParameters:
    """See Parameters. With tied embeddings, lm_head may be a packed copy of them. None after the
    first stage."""

    embeddings: torch.Tensor
    layers: tuple[PackedLayer, ...]
    norm: Norm[torch.Tensor]
    lm_head: Linear | None


def pack_parameters(parameters: Parameters, packing: Packing | None = None) -> PackedParameters:
    """Packs layer by layer, and empties both: no weight is there twice. packing: of what is in
    `parameters` alone if not given."""
    packing = packing or Packing(parameters.device)
    layers: list[PackedLayer] = []
    while parameters.layers:
        layers.append(packing.layer(parameters.layers.pop(0)))
    return PackedParameters(
        parameters.embeddings,
        tuple(layers),
        packing.norm(parameters.norm),
        None if parameters.lm_head is None else packing.linear(parameters.lm_head),
    )


class Packing:
    """Packs layers and linear layers one by one, native ones of a CPU into one arena.

    It is the Keeper of a checkpoint's quantised weights: a linear layer of these is packed once its
    last tensor is read, so that the host holds few of them as they are stored.
    """

    def __init__(
        self,
        device: torch.device,
        linears: Iterable[DenseLinear] = (),
        keeps: Callable[[StoredWeight], bool] = lambda _: True,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """device: where all goes. linears: those to be packed as soon as they are read. keeps: see
        Keeper. batch_invariant: layers that are not quantised give each row the same bits in any
        batch, as a CPU's native ones do in any case."""
        self.keeps = keeps
        self._device = device
        self._is_fixed = batch_invariant and device.type != "cpu"
        self._allocate = Arena().take
        self._kept: dict[str, StoredWeight] = {}
        self._packed: dict[tuple[str, ...], Linear] = {}
        self._waiting: dict[str, list[tuple[DenseLinear, set[str]]]] = {}
        """By tensor, the linear layers that it is part of, each with all that it still lacks."""
        for linear in linears:
            missing = {name for name, _ in linear.targets()}
            for name in missing:
                self._waiting.setdefault(name, []).append((linear, missing))

    @property
    def kept(self) -> Mapping[str, StoredWeight]:
        """By the checkpoint's names, weights that are not packed yet."""
        return self._kept

    def keep(self, layer: str, weight: StoredWeight) -> None:
        self._kept[layer] = weight

    def on_filled(self, name: str) -> None:
        """See Keeper."""
        for linear, missing in self._waiting.pop(name, ()):
            missing.discard(name)
            names = linear.spec.names
            if not missing and any(name in self._kept for name in names):
                self._packed[names] = self._pack(linear)

    def layer(self, layer: DenseLayer) -> PackedLayer:
        return layer.map(self.linear, _numbers)

    def norm(self, norm: Norm[Vector]) -> Norm[torch.Tensor]:
        """The norm on the target device."""
        return norm.map(_numbers)

    def linear(self, linear: DenseLinear) -> Linear:
        return self._packed.pop(linear.spec.names, None) or self._pack(linear)

    def _take_kept(self, linear: DenseLinear) -> list[StoredWeight]:
        """The layer's weights as stored; if only some of its tensors are quantised, these are
        dequantised into its memory instead."""
        kept = {name: self._kept.pop(name) for name in linear.spec.names if name in self._kept}
        if len(kept) == len(linear.spec.names):
            return list(kept.values())
        for name, target in linear.targets():
            if stored := kept.get(name.removesuffix(".weight")):
                target.tensor.copy_(stored.dequantize())
        return []

    def _pack(self, linear: DenseLinear) -> Linear:
        device = self._device
        bias = None if linear.bias is None else linear.bias.to(device)
        kept = self._take_kept(linear)
        if not linear.spec.num_out:
            return PlainLinear(linear.weight, bias)
        if not kept:
            weight = linear.weight.to(device)
            if linear.spec.is_transposed:
                weight = weight.t().contiguous()
            if self._is_fixed:
                return FixedLinear(weight, bias)
            return pack_linear(weight, bias, self._allocate)
        return _pack_quantized(stack(kept), bias, device, self._allocate)


def _numbers(vector: Vector) -> torch.Tensor:
    return vector.numbers


def _pack_quantized(
    weight: StoredWeight, bias: torch.Tensor | None, device: torch.device, allocate: Allocate
) -> Linear:
    if isinstance(weight, Mxfp4Weight):
        return pack_mxfp4(weight.codes.to(device), weight.powers.to(device), bias)
    if isinstance(weight, Float8Weight):
        return pack_float8(weight.codes, weight.scales, bias, device)
    weight = weight.with_zeros()
    levels, scales, zeros = weight.levels, weight.scales, weight.zeros
    return pack_quantized(levels, scales, zeros, weight.bits, bias, device, allocate)
