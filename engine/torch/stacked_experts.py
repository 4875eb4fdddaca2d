"""Tensors of a checkpoint that hold all experts of a layer, as one linear layer for each expert.

gpt-oss has them so: F.gate_up_proj [experts, in, out] and F.gate_up_proj_bias [experts, out], where
F is the layer's folder of experts, and alike down_proj; or, in mxfp4, F.gate_up_proj_blocks and
F.gate_up_proj_scales (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-
final-pdf): of each 32 numbers of a row of the weight [out, in], 16 bytes of two, the first in the
low four bits, and the power of two that they are multiplied by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

_STACKED = re.compile(
    r"(?P<folder>.+\.experts)\.(?P<layer>[a-z_]+_proj)(?P<kind>|_bias|_blocks|_scales)$"
)

#: What four bits mean: a sign, two bits of exponent and one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127
_NUM_OF_SCALE = 32

Piece = tuple[str, torch.Tensor]


class StackedExperts:
    """Takes tensors apart, one after the other, and keeps those in mxfp4 until their other half has
    come."""

    def __init__(self) -> None:
        self._halves: dict[str, dict[str, torch.Tensor]] = {}

    def takes(self, name: str) -> bool:
        """Whether it is one of these, by its name."""
        return _STACKED.match(name) is not None

    def pieces(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """Each expert's weight or bias that is whole now, by the name that it would have alone.
        Raises ValueError for what does not fit its other half."""
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
                yield from _decoded(folder, layer, halves["_blocks"], halves["_scales"])

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of tensors whose other half has come."""
        both = {"_blocks", "_scales"}
        return tuple(
            f"{name}{kind}" for name, found in self._halves.items() for kind in both - found.keys()
        )


def _named(folder: str, layer: str, part: str, stacked: torch.Tensor) -> Iterator[Piece]:
    for expert, tensor in enumerate(stacked):
        yield f"{folder}.{expert}.{layer}.{part}", tensor


def _decoded(
    folder: str, layer: str, blocks: torch.Tensor, scales: torch.Tensor
) -> Iterator[Piece]:
    """One expert at a time, so that no more are there at once."""
    is_right = blocks.dtype == scales.dtype == torch.uint8
    if not is_right or blocks.shape != (*scales.shape, _NUM_OF_SCALE // 2):
        raise ValueError(
            f"blocks {list(blocks.shape)} of {blocks.dtype} with scales {list(scales.shape)} of "
            f"{scales.dtype}: bytes are known, {_NUM_OF_SCALE // 2} with each scale"
        )
    for expert, (codes, powers) in enumerate(zip(blocks, scales, strict=True)):
        yield f"{folder}.{expert}.{layer}.weight", decode_mxfp4(codes, powers)


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks [rows, scales of a row, 16] uint8, scales [rows, scales of a row] uint8 -> [rows, 32 *
    scales of a row] float32."""
    values = torch.tensor((*_FP4, *(-value for value in _FP4)))
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1)
    numbers = values[pairs.flatten(2).int()]
    powers = scales.int() - _SCALE_BIAS
    return torch.ldexp(numbers, powers[..., None]).flatten(1)
