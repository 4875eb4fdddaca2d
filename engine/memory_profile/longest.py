"""The longest prompt whose memory a bound holds, by the type of the weights. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from types import MappingProxyType

from engine.plan.memory import sequence_bytes, stage_weight_bytes
from engine.plan.model import LayerSizes, ModelSizes, Storage, Weights
from engine.ranks.mesh import ONE_RANK

#: Bits of a weight of the linear layers; quantised ones have a scale of 16 bits for each 128.
WEIGHT_BITS: Mapping[str, int] = MappingProxyType({"16-bit": 16, "int8": 8, "int4": 4})
_GROUP, _SCALE_BYTES = 128, 2
_LONGEST = 1 << 27


@dataclass(frozen=True, slots=True)
class LongestPrompt:
    """num_tokens: 0 if the weights alone do not fit."""

    weights: str
    weight_bytes: int
    memory_bytes: int
    num_tokens: int


def with_weights(model: ModelSizes, bits: int) -> ModelSizes:
    """The model with the weights of attention, MLPs and experts in `bits` bits. The embeddings and
    the output layer stay as they are."""
    if bits == 16:
        return replace(model, storage=Storage("bfloat16"), layers=tuple(map(_plain, model.layers)))
    each = bits / 8 + _SCALE_BYTES / _GROUP
    storage = Storage("bfloat16", f"int{bits}", each, each, "bfloat16")
    return replace(model, storage=storage, layers=tuple(map(_quantized, model.layers)))


def _plain(layer: LayerSizes) -> LayerSizes:
    return _mapped(layer, lambda weights: Weights(plain=weights.total))


def _quantized(layer: LayerSizes) -> LayerSizes:
    return _mapped(layer, lambda weights: Weights(quantized=weights.total))


def _mapped(layer: LayerSizes, of: Callable[[Weights], Weights]) -> LayerSizes:
    return replace(
        layer, attention=of(layer.attention), mlp=of(layer.mlp), experts=of(layer.experts)
    )


def longest_prompt(
    model: ModelSizes, weights: str, activation_bytes: Callable[[int], int], memory_bytes: int
) -> LongestPrompt:
    """Longest prompt of one user: weights + activations + KV <= memory_bytes, by bisection.
    weights: of WEIGHT_BITS. activation_bytes: of a step, by the length that it reads."""
    stored = with_weights(model, WEIGHT_BITS[weights])
    weight_bytes = ceil(stage_weight_bytes(stored, ONE_RANK)[0])

    def fits(num_tokens: int) -> bool:
        (kv_bytes,) = sequence_bytes(stored, ONE_RANK, num_tokens, keeps_windows_apart=True)
        return weight_bytes + activation_bytes(num_tokens) + kv_bytes <= memory_bytes

    low, high = 0, _LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return LongestPrompt(weights, weight_bytes, memory_bytes, low)
