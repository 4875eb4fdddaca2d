"""`python -m baton.model.quantize`: a checkpoint, its linear layers rounded to a scheme, as a new checkpoint.

A process of its own, so that the command line stays without torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from baton.errors import ConfigError, StartupError, UnsupportedModel
from baton.model.checkpoint import find_shards, naming_model, resolve_checkpoint
from baton.model.config import ModelConfig, read_config
from baton.model.memory_plan import format_bytes
from baton.model.parameters import PARTS, layer_name
from baton.quantization.encode import encode
from baton.quantization.scheme import (
    GROUP_SIZES,
    SCHEMES,
    Scheme,
    choose_group_size,
    quantization_config,
)

_INDEX = "model.safetensors.index.json"


def main() -> int:
    """0, or 2 if nothing was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--scheme", choices=SCHEMES, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--revision")
    given = parser.parse_args()
    try:
        with naming_model(given.model):
            source = resolve_checkpoint(given.model, given.revision)
            before, after = quantize_checkpoint(source, given.output, given.scheme)
    except StartupError as error:
        sys.stderr.write(f"baton quantize: {error.reason}: {error}\n")
        return 2
    sys.stdout.write(
        f"{given.output}: {format_bytes(after)} of weights instead of {format_bytes(before)}\n"
    )
    return 0


def quantize_checkpoint(source: Path, output: Path, scheme: Scheme) -> tuple[int, int]:
    """Write `source` to the new folder `output`; returns the bytes of weights before and after.

    Everything but the linear layers of the decoder (embeddings, norms, biases, lm_head) stays as it is, and so do all other
    files. Raises ModelError, ConfigError.
    """
    config = read_config(source)
    if config.quantization is not None:
        raise UnsupportedModel(f"{source}: is quantised already; give the unquantised checkpoint")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError.of("output", str(output), "is there already; name a new folder")
    group_size = _group_size(config, scheme)
    shards = find_shards(source)
    output.mkdir(parents=True, exist_ok=True)
    names = _linear_weights(config)
    before, after, places = 0, 0, dict[str, str]()
    for path in shards:
        tensors = _encode_shard(path, names, scheme, group_size)
        save_file(tensors, output / path.name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, path.name)
        before += path.stat().st_size
        after += (output / path.name).stat().st_size
    _write_rest(source, output, places, quantization_config(scheme, group_size), after)
    return before, after


def _group_size(config: ModelConfig, scheme: Scheme) -> int | None:
    if scheme != "int4":
        return None
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    found = choose_group_size(widths)
    if found is None:
        raise UnsupportedModel(
            f"int4 needs layers whose inputs are a multiple of {GROUP_SIZES[-1]}; these have {sorted(set(widths))}"
        )
    return found


def _linear_weights(config: ModelConfig) -> frozenset[str]:
    parts = [part for names in PARTS.values() for part in names]
    return frozenset(
        f"{layer_name(index, part)}.weight" for index in range(config.num_layers) for part in parts
    )


def _encode_shard(
    path: Path, names: frozenset[str], scheme: Scheme, group_size: int | None
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(path, framework="pt", device="cpu") as shard:
        for name in sorted(shard.keys()):
            tensor = shard.get_tensor(name)
            if name in names:
                layer = name.removesuffix("weight")
                pieces = encode(tensor, scheme, group_size)
                tensors |= {layer + piece: stored for piece, stored in pieces.items()}
            else:
                tensors[name] = tensor
    return tensors


def _write_rest(
    source: Path,
    output: Path,
    places: dict[str, str],
    quantization: dict[str, object],
    num_bytes: int,
) -> None:
    """config.json with what was done, an index where there was one, and all other small files as they are."""
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != _INDEX:
            shutil.copyfile(path, output / path.name)
    raw = json.loads((source / "config.json").read_text())
    raw["quantization_config"] = quantization
    (output / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    if (source / _INDEX).is_file():
        index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        (output / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
