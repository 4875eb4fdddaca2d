"""Tensors of a checkpoint that hold all experts of a layer, as one linear layer for each expert.

gpt-oss stores F.gate_up_proj [experts, in, out] and F.gate_up_proj_bias [experts, out], with the
prefix F of the layer's experts, and down_proj likewise. In mxfp4 (see
baton_kernels.mxfp4_linear) these are F.gate_up_proj_blocks and F.gate_up_proj_scales: each 32
numbers of a row of the weight [out, in] are 16 bytes with two numbers each, the first in the low
nibble, and one power of two as their common factor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from baton_kernels.mxfp4_linear import BLOCK
from engine.quantization.weight import Mxfp4Weight

_STACKED = re.compile(
    r"(?P<folder>.+\.experts)\.(?P<layer>[a-z_]+_proj)(?P<kind>|_bias|_blocks|_scales)$"
)

Piece = tuple[str, torch.Tensor | Mxfp4Weight]


class StackedExperts:
    """Splits stacked tensors one at a time; keeps an mxfp4 half until the other has been read."""

    def __init__(self) -> None:
        self._halves: dict[str, dict[str, torch.Tensor]] = {}

    def takes(self, name: str) -> bool:
        """Whether a tensor of this name is stacked."""
        return _STACKED.match(name) is not None

    def pieces(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """Yield the experts' weights or biases that are complete now, by the names they would have
        unstacked. Raises ValueError for halves that do not fit together."""
        found = _STACKED.match(name)
        if found is None:
            raise ValueError(f"{name} holds no experts")
        folder, layer, kind = found["folder"], found["layer"], found["kind"]
        if kind == "":
            yield from _named(folder, layer, "weight", tensor.transpose(1, 2))
        elif kind == "_bias":
            yield from _named(folder, layer, "bias", tensor)
        else:
            halves = self._halves.setdefault(f"{folder}.{layer}", {})
            halves[kind] = tensor
            if len(halves) == 2:
                del self._halves[f"{folder}.{layer}"]
                yield from _packed(folder, layer, halves["_blocks"], halves["_scales"])

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of missing tensors; their other halves have been read."""
        both = {"_blocks", "_scales"}
        return tuple(
            f"{name}{kind}" for name, found in self._halves.items() for kind in both - found.keys()
        )


def _named(folder: str, layer: str, part: str, stacked: torch.Tensor) -> Iterator[Piece]:
    for expert, tensor in enumerate(stacked):
        yield f"{folder}.{expert}.{layer}.{part}", tensor


def _packed(folder: str, layer: str, blocks: torch.Tensor, scales: torch.Tensor) -> Iterator[Piece]:
    """Yield each expert's weight as stored."""
    is_right = blocks.dtype == scales.dtype == torch.uint8
    if not is_right or blocks.shape != (*scales.shape, BLOCK // 2):
        raise ValueError(
            f"blocks {list(blocks.shape)} of {blocks.dtype} with scales {list(scales.shape)} of "
            f"{scales.dtype}: bytes are known, {BLOCK // 2} with each scale"
        )
    for expert, (codes, powers) in enumerate(zip(blocks, scales, strict=True)):
        yield f"{folder}.{expert}.{layer}.weight", Mxfp4Weight(codes.flatten(1), powers)
