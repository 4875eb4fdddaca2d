"""LoRA adapters as PEFT saves them, and checkpoints with one merged into the weights. Written from
the format's description; shares no code with the product."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EMBEDDINGS = "embed_tokens"
MLP = ("gate_proj", "up_proj", "down_proj")


def layers_of(model: Path, targets: tuple[str, ...]) -> dict[str, torch.Size]:
    """The checkpoint's linear layers with names that end in one of these, with their shapes."""
    tensors = load_file(model / "model.safetensors")
    return {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in tensors.items()
        if name.removesuffix(".weight").endswith(targets) and name.endswith(".weight")
    }


def make_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: tuple[str, ...] = ATTENTION + MLP,
    seed: int = 1,
    **config: Any,
) -> Path:
    """A random adapter of `model`, wide enough to change greedy tokens. config: more settings."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, (num_out, num_in) in sorted(layers_of(model, targets).items()):
        name = f"base_model.model.{layer}"
        if layer.endswith(EMBEDDINGS):  # [vocab, hidden]
            a = torch.randn(rank, num_out, generator=generator) * 0.1
            tensors[f"{name}.lora_embedding_A"] = a
            b = torch.randn(num_in, rank, generator=generator) * 0.1
            tensors[f"{name}.lora_embedding_B"] = b
            continue
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator) * (
            num_in**-0.5
        )
        tensors[f"{name}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator) * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    raw = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    return folder


def merged(folder: Path, model: Path, adapter: Path) -> Path:
    """A checkpoint like `model` with W + s B A for each layer that the adapter changes."""
    shutil.copytree(model, folder)
    raw: Mapping[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    scale = raw["lora_alpha"] / (raw["r"] ** 0.5 if raw.get("use_rslora") else raw["r"])
    weights = load_file(model / "model.safetensors")
    deltas = load_file(adapter / "adapter_model.safetensors")
    for name, down in deltas.items():
        if name.endswith("lora_A.weight"):
            up = deltas[name.replace("lora_A", "lora_B")]
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{layer}.weight"] += scale * (up @ down)
        elif name.endswith("lora_embedding_A"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_embedding_A")
            up = deltas[name.replace("embedding_A", "embedding_B")]
            weights[f"{layer}.weight"] += scale * (up @ down).T
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
