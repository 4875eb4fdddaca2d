"""LoRA adapters as PEFT saves them, and checkpoints with one merged into the weights. Written from
the format's description; shares no code with the product."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EMBEDDINGS = "embed_tokens"
MLP = ("gate_proj", "up_proj", "down_proj")
#: Parameters with all experts of a layer, the outer one last, and what PEFT calls their modules
#: where both are adapted.
STACKS = {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}
_EXPERT = re.compile(r"(?P<folder>.+\.experts)\.(?P<index>\d+)\.(?P<part>[a-z_]+)\.weight$")


def layers_of(model: Path, targets: tuple[str, ...]) -> dict[str, torch.Size]:
    """The checkpoint's linear layers with names that end in one of these, with their shapes."""
    tensors = load_file(model / "model.safetensors")
    return {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in tensors.items()
        if name.removesuffix(".weight").endswith(targets) and name.endswith(".weight")
    }


def stacks_of(model: Path) -> dict[str, tuple[int, int, int]]:
    """Experts, outputs and inputs of all experts' layers, by `folder.gate_up_proj` and
    `folder.down_proj`, whether the checkpoint has them in one tensor or in many."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith(tuple(f"experts.{part}" for part in STACKS)):  # gpt-oss: [.., in, out]
            num, num_in, num_out = tensor.shape
            found[name] = num, num_out, num_in
        elif (match := _EXPERT.match(name)) and match["part"] != "up_proj":
            num_out, num_in = tensor.shape
            is_gate = match["part"] == "gate_proj"
            stack = f"{match['folder']}.{'gate_up_proj' if is_gate else 'down_proj'}"
            num = found.get(stack, (0,))[0] + 1
            found[stack] = num, num_out * (2 if is_gate else 1), num_in
    return found


def make_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: tuple[str, ...] = ATTENTION + MLP,
    stacks: tuple[str, ...] = (),
    seed: int = 1,
    **config: Any,
) -> Path:
    """A random adapter of `model`, wide enough to change greedy tokens. stacks: those of STACKS
    that it adapts as one parameter each. config: more settings."""
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
    for stack, (num, num_out, num_in) in stacks_of(model).items() if stacks else ():
        experts, part = stack.rsplit(".", 1)
        if part in stacks:
            alone = STACKS[part] if len(stacks) > 1 else "experts"
            name = f"base_model.model.{experts.removesuffix('experts')}{alone}"
            a, b = (torch.randn(num * rank, n, generator=generator) for n in (num_in, num_out))
            tensors[f"{name}.lora_A.weight"] = a * num_in**-0.5
            tensors[f"{name}.lora_B.weight"] = b.T.contiguous() * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    raw = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "target_parameters": [f"mlp.experts.{part}" for part in stacks] or None,
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
            if layer.endswith(("experts", "experts.base_layer")):
                parts = raw["target_parameters"]
                is_first = layer.endswith("base_layer") or parts == ["mlp.experts.gate_up_proj"]
                _merge_stack(weights, layer.removesuffix(".base_layer"), is_first, down, up, scale)
                continue
            weights[f"{layer}.weight"] += scale * (up @ down)
        elif name.endswith("lora_embedding_A"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_embedding_A")
            up = deltas[name.replace("embedding_A", "embedding_B")]
            weights[f"{layer}.weight"] += scale * (up @ down).T
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _merge_stack(
    weights: dict[str, torch.Tensor],
    folder: str,
    is_first: bool,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
) -> None:
    """Add to all experts in `folder`, to gate_up_proj if is_first, else to down_proj."""
    part = "gate_up_proj" if is_first else "down_proj"
    tensor = weights.get(f"{folder}.{part}")
    num = (
        len(tensor)
        if tensor is not None
        else sum(
            name.startswith(f"{folder}.") and name.endswith(".down_proj.weight") for name in weights
        )
    )
    a = down.reshape(num, -1, down.shape[1])
    b = up.reshape(len(up), -1, num)
    delta = torch.einsum("ore,eri->eoi", b, a) * scale
    if tensor is not None:
        tensor += delta.transpose(1, 2)
        return
    names = ("gate_proj", "up_proj") if is_first else ("down_proj",)
    for index in range(num):
        for name, rows in zip(names, delta[index].chunk(len(names)), strict=True):
            weights[f"{folder}.{index}.{name}.weight"] += rows
