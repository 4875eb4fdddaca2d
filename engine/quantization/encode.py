"""From a dense weight to the tensors of a quantised layer, in compressed-tensors' layout: the
inverse of decode."""

from __future__ import annotations

import torch

from engine.quantization.packing import pack
from engine.quantization.rounding import round_by_inputs, round_to_float8, round_to_integers
from engine.quantization.scheme import Scheme
from engine.quantization.sparsity import prune, prune_by_inputs


def encode(
    weight: torch.Tensor,
    scheme: Scheme,
    group_size: int | None,
    gram: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors by the last parts of their names; see decode. group_size: of int4 alone. gram: see
    round_by_inputs."""
    if scheme == "sparse24":
        return {"weight": prune(weight) if gram is None else prune_by_inputs(weight, gram)}
    if scheme == "fp8":
        numbers, scales = round_to_float8(weight)
        return {"weight": numbers, "weight_scale": scales.bfloat16()}
    if scheme == "int8":
        rounded = round_to_integers(weight, 8, weight.shape[1])
        signed = (rounded.levels.to(torch.int16) - rounded.middle).to(torch.int8)
        return {"weight": signed, "weight_scale": rounded.scales.bfloat16()}
    if group_size is None:
        raise ValueError("int4 needs a group size")
    rounded = (
        round_to_integers(weight, 4, group_size)
        if gram is None
        else round_by_inputs(weight, 4, group_size, gram)
    )
    return {
        "weight_packed": pack(rounded.levels, 4),
        "weight_scale": rounded.scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
