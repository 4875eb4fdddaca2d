"""Small checkpoints for measuring and for tests: the linear layers of a checkpoint rounded to the
nearest, in compressed-tensors' layout, or pruned to two of each four weights.

For checkpoints to serve use llm-compressor or GPTQModel, which calibrate: see docs/quantization.md.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.checkpoint import find_shards
from engine.families.layers import describe_layers, describe_output
from engine.families.read import read_config
from engine.quantization.weight import QuantizedWeight

Scheme = Literal["int8", "int4", "fp8", "sparse24"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
#: Schemes of the output layer: four bits, or half of the weights, are too few for it.
_OUTPUT_SCHEMES: Mapping[Scheme, Scheme] = {"int8": "int8", "int4": "int8", "fp8": "fp8"}
_FORMATS: Mapping[Scheme, str] = {
    "int8": "int-quantized",
    "int4": "pack-quantized",
    "fp8": "float-quantized",
}
#: Inputs of a group of int4: the largest that divides every layer is used.
_GROUP_SIZES = (128, 64, 32)
#: Shares of a group's largest weight that are tried as the end of its range.
_CLIPS = tuple(1 - 0.05 * i for i in range(9))
_FLOAT8_LARGEST = 448.0


def round_checkpoint(
    source: Path, output: Path, scheme: Scheme, *, keeps_output: bool = False
) -> None:
    """Write `source` to the new folder `output`, in one file of weights.

    Embeddings, norms, biases and all other files stay as they are. The output layer, lm_head,
    becomes a layer of its own if it was tied to the embeddings; with keeps_output it stays as it
    is. Raises StopIteration if no group size of int4 divides every layer.
    """
    config = read_config(source)
    linears = [linear for layer in describe_layers(config) for linear in layer.linears]
    quantizable = [linear for linear in linears if linear.is_quantizable]
    widths = [*(linear.num_in for linear in quantizable), describe_output(config).num_in]
    group_size = None
    if scheme == "int4":
        group_size = next(g for g in _GROUP_SIZES if all(width % g == 0 for width in widths))
    of_output = None if keeps_output else _OUTPUT_SCHEMES.get(scheme)
    tensors: dict[str, torch.Tensor] = {}
    for path in find_shards(source):
        with safe_open(path, framework="pt", device="cpu") as shard:
            tensors |= {name: shard.get_tensor(name) for name in sorted(shard.keys())}
    for layer in (name for linear in quantizable for name in linear.names):
        pieces = encode(tensors.pop(f"{layer}.weight"), scheme, group_size)
        tensors |= {f"{layer}.{piece}": tensor for piece, tensor in pieces.items()}
    if of_output is not None:
        weight = tensors.pop("lm_head.weight", torch.empty(0))
        weight = tensors["model.embed_tokens.weight"] if config.is_tied else weight
        pieces = encode(weight, of_output, None)
        tensors |= {f"lm_head.{piece}": tensor for piece, tensor in pieces.items()}
    output.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in path.name:
            shutil.copyfile(path, output / path.name)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    if scheme != "sparse24":
        raw["quantization_config"] = _quantization_config(scheme, group_size, of_output)
    raw["tie_word_embeddings"] = config.is_tied and of_output is None
    (output / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def encode(weight: torch.Tensor, scheme: Scheme, group_size: int | None) -> dict[str, torch.Tensor]:
    """A dense weight [num_out, num_in] -> tensors by the last parts of their names. group_size: of
    int4 alone."""
    if scheme == "sparse24":
        return {"weight": prune(weight)}
    if scheme == "fp8":
        numbers, scales = round_to_float8(weight)
        return {"weight": numbers, "weight_scale": scales.bfloat16()}
    rounded = round_to_integers(weight, 4 if group_size else 8, group_size or weight.shape[1])
    if group_size is None:
        signed = (rounded.levels.to(torch.int16) - rounded.middle).to(torch.int8)
        return {"weight": signed, "weight_scale": rounded.scales.bfloat16()}
    return {
        "weight_packed": pack(rounded.levels, 4),
        "weight_scale": rounded.scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def pack(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of engine.quantization.packing.unpack: levels [rows, columns] uint8 in
    [0, 2^bits) -> [rows, ceil(columns * bits / 32)] int32, the first in the lowest bits."""
    per_word = 32 // bits
    rows, columns = levels.shape
    padded = torch.nn.functional.pad(levels, (0, -columns % per_word))
    shifts = torch.arange(per_word, dtype=torch.int64) * bits
    words = (padded.view(rows, -1, per_word).long() << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def round_to_integers(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Symmetric levels of weight [num_out, num_in] in groups of `group_size` inputs, which must
    divide num_in.

    At 4 bits each group takes, of the ranges in _CLIPS, the one with the smallest sum of squared
    errors. Scales are rounded to bfloat16, as they are stored.
    """
    num_out, num_in = weight.shape
    middle = 1 << (bits - 1)
    grouped = weight.float().view(num_out, -1, group_size)
    largest = grouped.abs().amax(-1, keepdim=True)
    best = torch.ones_like(largest)
    least = torch.full_like(largest, float("inf"))
    for clip in _CLIPS if bits < 8 else (1.0,):
        scales = _stored(largest * clip / (middle - 0.5))
        levels = (grouped / scales).round().clamp(-middle, middle - 1)
        error = (levels * scales - grouped).square().sum(-1, keepdim=True)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    levels = ((grouped / best).round().clamp(-middle, middle - 1) + middle).to(torch.uint8)
    return QuantizedWeight(levels.view(num_out, num_in), best.view(num_out, -1), None, bits)


def round_to_float8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [num_out, num_in] -> the same as float8 e4m3, and scales [num_out, 1] float32
    (bfloat16 values)."""
    wide = weight.float()
    scales = _stored(wide.abs().amax(-1, keepdim=True) / _FLOAT8_LARGEST)
    levels = (wide / scales).clamp(-_FLOAT8_LARGEST, _FLOAT8_LARGEST)
    return levels.to(torch.float8_e4m3fn), scales


def prune(weight: torch.Tensor) -> torch.Tensor:
    """2:4 sparsity: weight [num_out, num_in], num_in a multiple of 4, with zeros for the two
    smaller of each four. Of equals the first stay."""
    if weight.shape[1] % 4:
        raise ValueError(f"{weight.shape[1]} inputs are no multiple of 4")
    sizes = weight.float().abs().view(len(weight), -1, 4)
    order = sizes.argsort(dim=-1, descending=True, stable=True)
    is_kept = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[..., :2], True)
    return torch.where(is_kept.view(weight.shape), weight, torch.zeros_like(weight))


def _stored(scales: torch.Tensor) -> torch.Tensor:
    """As bfloat16 holds them; 1 where all weights are zero."""
    rounded = scales.bfloat16().float()
    return torch.where(rounded > 0, rounded, 1.0)


def _quantization_config(
    scheme: Scheme, group_size: int | None, output: Scheme | None
) -> dict[str, Any]:
    """quantization_config of config.json. output: the scheme of lm_head, None if it is dense."""
    groups = {"group_0": _config_group("Linear", scheme, group_size, scheme != "int4")}
    if output not in (None, scheme):
        groups["group_1"] = _config_group("re:.*lm_head", output, None, scheme != "int4")
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme] if len(groups) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"] if output is None else [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _config_group(
    target: str, scheme: Scheme, group_size: int | None, has_activations: bool
) -> dict[str, Any]:
    """has_activations: they are rounded, too, token by token."""
    weights: dict[str, Any] = {
        "num_bits": 4 if scheme == "int4" else 8,
        "type": "float" if scheme == "fp8" else "int",
        "symmetric": True,
        "strategy": "group" if scheme == "int4" else "channel",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    activations = {**weights, "strategy": "token", "dynamic": True, "observer": None}
    return {
        "format": _FORMATS[scheme],
        "targets": [target],
        "weights": weights,
        "input_activations": activations if has_activations else None,
        "output_activations": None,
    }
