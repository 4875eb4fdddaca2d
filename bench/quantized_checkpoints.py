"""Writes quantised checkpoints for tests and benchmarks, by rounding to nearest, in
compressed-tensors' layout.

Published checkpoints come from dedicated tools: llm-compressor, GPTQModel.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from baton.errors import UnsupportedModel
from engine.checkpoint import find_shards
from engine.families.config import ModelConfig
from engine.families.layers import describe_layers, describe_output
from engine.families.read import read_config
from engine.quantization.packing import pack
from engine.quantization.weight import QuantizedWeight

Scheme = Literal["int8", "int4", "fp8", "sparse24"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
#: Scheme of the output layer: four bits or 2:4 sparsity cost it too much quality.
_OUTPUT_SCHEMES: Mapping[Scheme, Scheme] = {"int8": "int8", "int4": "int8", "fp8": "fp8"}
#: Group sizes of int4, the best for speed first.
_GROUP_SIZES = (128, 64, 32)
_FORMATS: Mapping[Scheme, str] = {
    "int8": "int-quantized",
    "int4": "pack-quantized",
    "fp8": "float-quantized",
}
_INDEX = "model.safetensors.index.json"
#: Candidate ranges, as shares of a group's largest weight: clipping few weights may reduce the
#: error of the others.
_CLIPS = tuple(1 - 0.05 * i for i in range(9))
#: The largest number of float8 e4m3.
_FLOAT8_LARGEST = 448.0


def quantize_checkpoint(
    source: Path,
    output: Path,
    scheme: Scheme,
    *,
    keeps_output: bool = False,
) -> tuple[int, int]:
    """Write `source` to the new folder `output`; returns the bytes of weights before and after.

    Everything but the linear layers (embeddings, norms, biases) stays as it is. The output layer
    becomes one of its own if it was tied to the embeddings; keeps_output: it stays as it is, too.
    Raises ModelError.
    """
    config = read_config(source)
    experts = config.traits.experts
    if experts is not None and experts.is_stacked:
        raise UnsupportedModel(f"{source}: all experts of a layer are in one tensor")
    group_size = _group_size(config, scheme)
    shards = find_shards(source)
    output.mkdir(parents=True, exist_ok=True)
    of_output = None if keeps_output else _OUTPUT_SCHEMES.get(scheme)
    plan = _plan(config, scheme, of_output)
    before, after, places = 0, 0, dict[str, str]()
    for path in shards:
        tensors = _encode_shard(path, plan, group_size)
        save_file(tensors, output / path.name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, path.name)
        before += path.stat().st_size
        after += (output / path.name).stat().st_size
    raw = json.loads((source / "config.json").read_text())
    if scheme != "sparse24":
        raw["quantization_config"] = _quantization_config(scheme, group_size, of_output)
    raw["tie_word_embeddings"] = config.is_tied and of_output is None
    _write_rest(source, output, places, raw, after)
    return before, after


def _group_size(config: ModelConfig, scheme: Scheme) -> int | None:
    if scheme != "int4":
        return None
    linears = [linear for layer in describe_layers(config) for linear in layer.linears]
    widths = [linear.num_in for linear in linears if linear.is_quantizable]
    widths.append(describe_output(config).num_in)
    found = _choose_group_size(widths)
    if found is None:
        raise UnsupportedModel(
            f"int4 needs layers whose inputs are a multiple of {_GROUP_SIZES[-1]}; these have "
            f"{sorted(set(widths))}"
        )
    return found


def _choose_group_size(num_inputs: Iterable[int]) -> int | None:
    """The first of _GROUP_SIZES that divides the inputs of every layer; None if none does."""
    sizes = set(num_inputs)
    return next((g for g in _GROUP_SIZES if all(size % g == 0 for size in sizes)), None)


@dataclass(frozen=True, slots=True)
class _Rounding:
    """Treatment of a tensor: name and scheme of its linear layer, and whether the original stays,
    too."""

    layer: str
    scheme: Scheme
    is_kept: bool = False


def _plan(
    config: ModelConfig, scheme: Scheme, of_output: Scheme | None
) -> dict[str, _Rounding | None]:
    """By the names of the tensors that become linear layers, or are left out."""
    linears = [linear for layer in describe_layers(config) for linear in layer.linears]
    names = [name for linear in linears if linear.is_quantizable for name in linear.names]
    plan: dict[str, _Rounding | None] = {
        f"{name}.weight": _Rounding(name, scheme) for name in names
    }
    if of_output is None:
        return plan
    # Some tied checkpoints contain lm_head.weight nevertheless.
    plan["lm_head.weight"] = None
    source = "model.embed_tokens.weight" if config.is_tied else "lm_head.weight"
    plan[source] = _Rounding("lm_head", of_output, is_kept=config.is_tied)
    return plan


def _encode_shard(
    path: Path,
    plan: Mapping[str, _Rounding | None],
    group_size: int | None,
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(path, framework="pt", device="cpu") as shard:
        for name in sorted(shard.keys()):
            tensor, rounding = shard.get_tensor(name), plan.get(name)
            if name not in plan or (rounding and rounding.is_kept):
                tensors[name] = tensor
            if rounding:
                pieces = encode(tensor, rounding.scheme, group_size)
                tensors |= {f"{rounding.layer}.{piece}": kept for piece, kept in pieces.items()}
    return tensors


def _write_rest(
    source: Path,
    output: Path,
    places: dict[str, str],
    config: dict[str, object],
    num_bytes: int,
) -> None:
    """Write config.json, an index if the source has one, and copies of all other small files."""
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != _INDEX:
            shutil.copyfile(path, output / path.name)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (source / _INDEX).is_file():
        index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        (output / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _quantization_config(
    scheme: Scheme, group_size: int | None, output: Scheme | None
) -> dict[str, Any]:
    """quantization_config for linear layers of a scheme, with lm_head in scheme `output`, or
    unquantised if None.

    scheme: one that rounds. group_size: for int4 only.
    """
    has_activations = scheme != "int4"
    groups = {"group_0": _group("Linear", scheme, group_size, has_activations)}
    if output not in (None, scheme):
        groups["group_1"] = _group("re:.*lm_head", output, None, has_activations)
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme] if len(groups) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"] if output is None else [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(
    target: str, scheme: Scheme, group_size: int | None, has_activations: bool
) -> dict[str, Any]:
    """has_activations: activations are quantised dynamically per token, by runtimes that compute in
    the scheme."""
    weights: dict[str, Any] = {
        "num_bits": 4 if scheme == "int4" else 8,
        "type": "float" if scheme == "fp8" else "int",
        "symmetric": True,
        "strategy": "group" if scheme == "int4" else "channel",
        "group_size": group_size if scheme == "int4" else None,
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


def encode(weight: torch.Tensor, scheme: Scheme, group_size: int | None) -> dict[str, torch.Tensor]:
    """Tensors by the last part of their names, see engine.quantization.decode. group_size: for int4
    only."""
    if scheme == "sparse24":
        return {"weight": prune(weight)}
    if scheme == "fp8":
        numbers, scales = round_to_float8(weight)
        return {"weight": numbers, "weight_scale": scales.bfloat16()}
    if scheme == "int8":
        rounded = round_to_integers(weight, 8, weight.shape[1])
        signed = (rounded.levels.to(torch.int16) - rounded.middle).to(torch.int8)
        return {"weight": signed, "weight_scale": rounded.scales.bfloat16()}
    if group_size is None:
        raise ValueError("int4 needs a group size")
    rounded = round_to_integers(weight, 4, group_size)
    return {
        "weight_packed": pack(rounded.levels, 4),
        "weight_scale": rounded.scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def round_to_integers(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Symmetric levels of weight [num_out, num_in] in groups of `group_size` inputs, which must
    divide num_in.

    Each group uses the range of _CLIPS with the smallest sum of squared errors. Scales are rounded
    to bfloat16, as stored.
    """
    num_out, num_in = weight.shape
    grouped = weight.float().view(num_out, -1, group_size)
    scales = _best_scales(grouped, bits)
    levels = _levels(grouped, scales, bits)
    return QuantizedWeight(levels.view(num_out, num_in), scales.view(num_out, -1), None, bits)


def _best_scales(grouped: torch.Tensor, bits: int) -> torch.Tensor:
    """Scales [..., 1] of groups [..., inputs], by the range of _CLIPS with the least squared
    error."""
    middle = 1 << (bits - 1)
    largest = grouped.abs().amax(-1, keepdim=True)
    best = torch.ones_like(largest)
    least = torch.full_like(largest, float("inf"))
    for clip in _CLIPS if bits < 8 else (1.0,):
        scales = _stored(largest * clip / (middle - 0.5))
        levels = (grouped / scales).round().clamp(-middle, middle - 1)
        error = (levels * scales - grouped).square().sum(-1, keepdim=True)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best


def _levels(weight: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8."""
    middle = 1 << (bits - 1)
    return ((weight / scales).round().clamp(-middle, middle - 1) + middle).to(torch.uint8)


def round_to_float8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [num_out, num_in] -> the same as float8 e4m3, and scales [num_out, 1] float32
    (bfloat16 values)."""
    wide = weight.float()
    scales = _stored(wide.abs().amax(-1, keepdim=True) / _FLOAT8_LARGEST)
    levels = (wide / scales).clamp(-_FLOAT8_LARGEST, _FLOAT8_LARGEST)
    return levels.to(torch.float8_e4m3fn), scales


def _stored(scales: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, as stored; 1 where all weights are zero."""
    rounded = scales.bfloat16().float()
    return torch.where(rounded > 0, rounded, 1.0)


def prune(weight: torch.Tensor) -> torch.Tensor:
    """weight [num_out, num_in], num_in a multiple of 4, with the two smaller of each four set to
    zero; the first ones win ties."""
    if weight.shape[1] % 4:
        raise ValueError(f"{weight.shape[1]} inputs are no multiple of 4")
    return torch.where(_largest_two(weight.float().abs()), weight, torch.zeros_like(weight))


def _largest_two(sizes: torch.Tensor) -> torch.Tensor:
    """Mask [num_out, num_in] of the two largest of each four."""
    order = sizes.view(len(sizes), -1, 4).argsort(dim=-1, descending=True, stable=True)
    is_kept = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[..., :2], True)
    return is_kept.view(sizes.shape)
