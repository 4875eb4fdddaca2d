"""Weights of a mixture's experts, for kernels that run all of them in one launch: addresses of each
expert's large tensor, and the small ones stacked. One form for each kind of linear layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from baton_kernels.linear import Linear, PlainLinear
from baton_kernels.mxfp4_linear import Mxfp4Linear
from baton_kernels.quantized_linear import Float8Linear, IntLinear, IntWeight


@dataclass(frozen=True, slots=True)
class StackedWeights:
    """addresses [experts] int64, on the weights' device; is_aligned: all are multiples of 16;
    biases [experts, num_out], None without."""

    addresses: torch.Tensor
    is_aligned: bool
    biases: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PlainStack(StackedWeights):
    """Addresses are of weights [num_out, num_in] in the type of the inputs."""


@dataclass(frozen=True, slots=True)
class Float8Stack(StackedWeights):
    """Addresses are of Float8Linear.codes. scales [experts, groups, num_out] float32."""

    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class IntStack(StackedWeights):
    """Addresses are of IntWeight.levels; bits, run: see there. scales [experts, groups, num_out]
    float32; zeros like them, int16, or None if all are symmetric."""

    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    run: int


@dataclass(frozen=True, slots=True)
class Mxfp4Stack(StackedWeights):
    """Addresses are of Mxfp4Linear.codes. powers [experts, pairs, num_out] int16: two blocks each,
    the first in the lower byte."""

    powers: torch.Tensor


def _plain(layers: Sequence[PlainLinear]) -> PlainStack:
    return PlainStack(*_common([x.weight for x in layers], [x.bias for x in layers]))


def _float8(layers: Sequence[Float8Linear]) -> Float8Stack:
    common = _common([x.codes for x in layers], [x.bias for x in layers])
    return Float8Stack(*common, torch.stack([x.scales for x in layers]))


def _integers(layers: Sequence[IntLinear]) -> IntStack | None:
    weights = [x.weight for x in layers]
    if len({(weight.bits, weight.scales.shape) for weight in weights}) > 1:
        return None
    common = _common([weight.levels for weight in weights], [x.bias for x in layers])
    scales = torch.stack([weight.scales for weight in weights])
    return IntStack(*common, scales, _zeros(weights), weights[0].bits, weights[0].run)


def _mxfp4(layers: Sequence[Mxfp4Linear]) -> Mxfp4Stack:
    common = _common([x.codes for x in layers], [x.bias for x in layers])
    return Mxfp4Stack(
        *common, torch.stack([x.powers for x in layers]).view(torch.int16).squeeze(-1)
    )


def _zeros(weights: Sequence[IntWeight]) -> torch.Tensor | None:
    """[weights, groups, num_out] int16; None if all are symmetric."""
    if all(weight.zeros is None for weight in weights):
        return None
    middle = 1 << (weights[0].bits - 1)
    return torch.stack(
        [
            torch.full_like(weight.scales, middle, dtype=torch.int16)
            if weight.zeros is None
            else weight.zeros
            for weight in weights
        ]
    )


def _common(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, bool, torch.Tensor | None]:
    """Fields of StackedWeights."""
    at = [weight.data_ptr() for weight in weights]
    own = [bias for bias in biases if bias is not None]
    return (
        torch.tensor(at, device=weights[0].device),
        all(address % 16 == 0 for address in at),
        torch.stack(own) if own else None,
    )


L = TypeVar("L", bound=Linear)
Stack = Callable[[Sequence[Linear]], StackedWeights | None]


def _of(kind: type[L], stack: Callable[[Sequence[L]], StackedWeights | None]) -> Stack:
    def try_stack(layers: Sequence[Linear]) -> StackedWeights | None:
        own = [layer for layer in layers if isinstance(layer, kind)]
        return stack(own) if own and len(own) == len(layers) else None

    return try_stack


_STACKS = (
    _of(PlainLinear, _plain),
    _of(Float8Linear, _float8),
    _of(IntLinear, _integers),
    _of(Mxfp4Linear, _mxfp4),
)


def stack_weights(layers: Sequence[Linear]) -> StackedWeights | None:
    """None if the layers are of several kinds or shapes of scales, or of a kind without a form
    here."""
    return next(filter(None, (stack(layers) for stack in _STACKS)), None)
