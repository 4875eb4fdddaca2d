"""A decoder's parameters in the form that runs: each linear layer packed for where it runs,
once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.errors import UnsupportedModel
from baton.model.parameters import PARTS, LayerParameters, Parameters, layer_name
from baton.model.parameters import Linear as DenseLinear
from baton.quantization.weight import Float8Weight, StoredWeight, stack
from baton_kernels.cpu.memory import Allocate, Arena
from baton_kernels.linear import Linear, pack_float8, pack_linear, pack_quantized


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """As LayerParameters."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class PackedParameters:
    """As Parameters. Where embeddings are tied, lm_head may hold a packed copy of them."""

    embeddings: torch.Tensor
    layers: tuple[PackedLayer, ...]
    norm: torch.Tensor
    lm_head: Linear


def pack_parameters(parameters: Parameters, quantized: dict[str, StoredWeight]) -> PackedParameters:
    """Packs layer by layer. `quantized`: by the checkpoint's names, weights that are not in
    `parameters`.

    Both are emptied as layers are packed, so that no weight is there twice. Linear layers get to
    where the norms are, native ones of a CPU into one arena.
    """
    layers: list[PackedLayer] = []
    allocate = Arena().take
    while parameters.layers:
        layers.append(_pack_layer(len(layers), parameters.layers.pop(0), quantized, allocate))
    head, device = quantized.pop("lm_head", None), parameters.norm.device
    lm_head = (
        _pack_quantized(head, None, device, allocate)
        if head
        else pack_linear(parameters.lm_head.to(device), None, allocate)
    )
    return PackedParameters(parameters.embeddings, tuple(layers), parameters.norm, lm_head)


def _pack_layer(
    index: int,
    layer: LayerParameters,
    quantized: dict[str, StoredWeight],
    allocate: Allocate,
) -> PackedLayer:
    device = layer.input_norm.device

    def pack(field: str, linear: DenseLinear) -> Linear:
        bias = None if linear.bias is None else linear.bias.to(device)
        names = [layer_name(index, part) for part in PARTS[field]]
        kept = [quantized.pop(name) for name in names if name in quantized]
        if not kept:
            return pack_linear(linear.weight.to(device), bias, allocate)
        if len(kept) < len(names):
            raise UnsupportedModel(f"of {names} some are quantised and some are not")
        return _pack_quantized(stack(kept), bias, device, allocate)

    return PackedLayer(
        input_norm=layer.input_norm,
        qkv=pack("qkv", layer.qkv),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        output=pack("output", layer.output),
        post_norm=layer.post_norm,
        gate_up=pack("gate_up", layer.gate_up),
        down=pack("down", layer.down),
    )


def _pack_quantized(
    weight: StoredWeight, bias: torch.Tensor | None, device: torch.device, allocate: Allocate
) -> Linear:
    if isinstance(weight, Float8Weight):
        return pack_float8(weight.codes, weight.scales, bias, device)
    levels, scales, zeros = weight.levels, weight.scales, weight.zeros
    return pack_quantized(levels, scales, zeros, weight.bits, bias, device, allocate)
