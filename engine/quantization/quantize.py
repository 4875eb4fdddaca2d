"""`python -m engine.quantization.quantize`: a checkpoint, its linear layers rounded or pruned by a
scheme, as a new checkpoint.

A process of its own, so that the command line stays without torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from baton.errors import ConfigError, StartupError, UnsupportedModel
from engine.checkpoint import find_shards, naming_model, resolve_checkpoint
from engine.families.config import ModelConfig
from engine.families.layers import describe_layers, describe_output
from engine.families.read import read_config
from engine.memory_plan import format_bytes
from engine.quantization.calibration import grams, read_pieces
from engine.quantization.encode import encode
from engine.quantization.scheme import (
    CALIBRATED,
    GROUP_SIZES,
    OUTPUT_SCHEMES,
    SCHEMES,
    Scheme,
    choose_group_size,
    quantization_config,
)

#: A layer's tensors, by the last parts of their names.
Pieces = dict[str, torch.Tensor]
_INDEX = "model.safetensors.index.json"


def main() -> int:
    """0, or 2 if nothing was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--scheme", choices=SCHEMES, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--revision")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--keep-output-layer", action="store_true")
    given = parser.parse_args()
    try:
        with naming_model(given.model):
            source = resolve_checkpoint(given.model, given.revision)
            before, after = quantize_checkpoint(
                source,
                given.output,
                given.scheme,
                keeps_output=given.keep_output_layer,
                calibration=given.calibration,
            )
    except StartupError as error:
        sys.stderr.write(f"baton quantize: {error.reason}: {error}\n")
        return 2
    sys.stdout.write(
        f"{given.output}: {format_bytes(after)} of weights instead of {format_bytes(before)}\n"
    )
    return 0


def quantize_checkpoint(
    source: Path,
    output: Path,
    scheme: Scheme,
    *,
    keeps_output: bool = False,
    calibration: Path | None = None,
) -> tuple[int, int]:
    """Write `source` to the new folder `output`; returns the bytes of weights before and after.

    Everything but the linear layers (embeddings, norms, biases) stays as it is, and so do all other
    files. The output layer, lm_head, becomes one of its own if it was tied to the embeddings;
    keeps_output: it stays as it is, too. calibration: a file of text, for schemes of CALIBRATED:
    see engine.quantization.calibration. Raises ModelError, ConfigError.
    """
    try:
        config = read_config(source)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{source}: {error.message}. What transformers' code runs is served as it is, or as "
            "other tools quantise it: docs/quantization.md names their formats"
        ) from error
    if config.quantization is not None:
        raise UnsupportedModel(f"{source}: is quantised already; give the unquantised checkpoint")
    experts = config.traits.experts
    if experts is not None and experts.is_stacked:
        raise UnsupportedModel(
            f"{source}: all experts of a layer are in one tensor, which cannot be rounded here"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError.of("output", str(output), "is there already; name a new folder")
    if calibration is not None and scheme not in CALIBRATED:
        known = " and ".join(CALIBRATED)
        raise ConfigError.of(
            "calibration", str(calibration), f"is for {known}; eight bits need none"
        )
    group_size = _group_size(config, scheme)
    shards = find_shards(source)
    calibrated: dict[str, Pieces] = {}
    if calibration is not None:
        texts = read_pieces(source, calibration, config)
        calibrated = _encode_by_inputs(source, config, texts, scheme, group_size)
    output.mkdir(parents=True, exist_ok=True)
    of_output = None if keeps_output else OUTPUT_SCHEMES.get(scheme)
    plan = _plan(config, scheme, of_output)
    before, after, places = 0, 0, dict[str, str]()
    for path in shards:
        tensors = _encode_shard(path, plan, group_size, calibrated)
        save_file(tensors, output / path.name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, path.name)
        before += path.stat().st_size
        after += (output / path.name).stat().st_size
    raw = json.loads((source / "config.json").read_text())
    if scheme != "sparse24":
        raw["quantization_config"] = quantization_config(scheme, group_size, of_output)
    raw["tie_word_embeddings"] = config.is_tied and of_output is None
    _write_rest(source, output, places, raw, after)
    return before, after


def _group_size(config: ModelConfig, scheme: Scheme) -> int | None:
    if scheme != "int4":
        return None
    linears = [linear for layer in describe_layers(config) for linear in layer.linears]
    widths = [linear.num_in for linear in linears if linear.is_quantizable]
    widths.append(describe_output(config).num_in)
    found = choose_group_size(widths)
    if found is None:
        raise UnsupportedModel(
            f"int4 needs layers whose inputs are a multiple of {GROUP_SIZES[-1]}; these have "
            f"{sorted(set(widths))}"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Rounding:
    """What becomes of a tensor: the linear layer that it is rounded to, by which scheme, and
    whether it stays beside that."""

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
    # Some tied checkpoints have it all the same.
    plan["lm_head.weight"] = None
    source = "model.embed_tokens.weight" if config.is_tied else "lm_head.weight"
    plan[source] = _Rounding("lm_head", of_output, is_kept=config.is_tied)
    return plan


def _encode_by_inputs(
    source: Path,
    config: ModelConfig,
    texts: Sequence[Sequence[int]],
    scheme: Scheme,
    group_size: int | None,
) -> dict[str, Pieces]:
    """What becomes of the decoder's linear layers, by name, rounded for what they are given as the
    model reads `texts`."""
    places: dict[str, Path] = {}
    for path in find_shards(source):
        with safe_open(path, framework="pt", device="cpu") as shard:
            places |= dict.fromkeys(shard.keys(), path)
    encoded: dict[str, Pieces] = {}
    for of_layer in grams(source, config, texts):
        for layer, gram in of_layer.items():
            name = f"{layer}.weight"
            with safe_open(places[name], framework="pt", device="cpu") as shard:
                encoded[layer] = encode(shard.get_tensor(name), scheme, group_size, gram)
    return encoded


def _encode_shard(
    path: Path,
    plan: Mapping[str, _Rounding | None],
    group_size: int | None,
    calibrated: Mapping[str, Pieces],
) -> dict[str, torch.Tensor]:
    """calibrated: by layer, what is encoded already."""
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(path, framework="pt", device="cpu") as shard:
        for name in sorted(shard.keys()):
            tensor, rounding = shard.get_tensor(name), plan.get(name)
            if name not in plan or (rounding and rounding.is_kept):
                tensors[name] = tensor
            if rounding:
                pieces = calibrated.get(rounding.layer)
                pieces = pieces or encode(tensor, rounding.scheme, group_size)
                tensors |= {f"{rounding.layer}.{piece}": kept for piece, kept in pieces.items()}
    return tensors


def _write_rest(
    source: Path,
    output: Path,
    places: dict[str, str],
    config: dict[str, object],
    num_bytes: int,
) -> None:
    """config.json as `config`, an index where there was one, and all other small files as they
    are."""
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != _INDEX:
            shutil.copyfile(path, output / path.name)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (source / _INDEX).is_file():
        index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        (output / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
