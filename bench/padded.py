"""Pads a model with layers that do not change its output, to measure speculation at larger sizes.

Drafts are then as often correct as for the small model that they were trained for.

    python -m bench.padded --model models/baton-py-6m --num-layers 64 --output DIR

Appends layers with random weights to a Llama. Their contributions to the state are multiplied by
zeros, so they are computed like other layers and have no effect.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

#: Last weights of attention and MLP, set to zero in added layers.
_LAST = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def pad(model: Path, num_layers: int, output: Path) -> None:
    """output: must not exist. Raises ValueError if the model has num_layers layers or more."""
    config = json.loads((model / "config.json").read_text())
    num_own = config["num_hidden_layers"]
    if num_layers <= num_own:
        raise ValueError(f"--num-layers={num_layers}: the model has {num_own}; give more")
    shutil.copytree(model, output)
    config["num_hidden_layers"] = num_layers
    (output / "config.json").write_text(json.dumps(config, indent=2))
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    first = {
        found[1]: tensor
        for name, tensor in tensors.items()
        if (found := re.fullmatch(r"model\.layers\.0\.(.+)", name))
    }
    for layer in range(num_own, num_layers):
        for part, like in first.items():
            new = torch.randn(like.shape, generator=generator) * like.shape[-1] ** -0.5
            new *= part not in _LAST
            tensors[f"model.layers.{layer}.{part}"] = new.to(like.dtype)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models/baton-py-6m"))
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    pad(arguments.model, arguments.num_layers, arguments.output)


if __name__ == "__main__":
    main()
