"""Tiny checkpoints in the layouts of other tools, beside a dense one with the very weights that
they mean.

The packing here is written from the layouts' descriptions, number by number, and shares no code
with the product.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import make_tiny_model

Tensors = dict[str, torch.Tensor]
GROUP_SIZE = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LINEAR = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)


def words_of(rows: list[list[int]], bits: int) -> torch.Tensor:
    """Each row's numbers, 32 / bits to an int32, the first lowest."""
    per_word = 32 // bits
    made = []
    for row in rows:
        words = []
        for at in range(0, len(row), per_word):
            word = sum(level << (bits * i) for i, level in enumerate(row[at : at + per_word]))
            words.append(word - (1 << 32) if word >> 31 else word)
        made.append(words)
    return torch.tensor(made, dtype=torch.int32)


@dataclass(frozen=True)
class Rounded:
    """levels [out, in] integers from 0; scales and zeros [out, groups]; order [in]: the group of
    each input."""

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor
    bits: int

    def dense(self) -> torch.Tensor:
        zeros, scales = self.zeros[:, self.order], self.scales[:, self.order]
        return (self.levels - zeros).float() * scales


def round_weight(
    weight: torch.Tensor, bits: int, group_size: int, symmetric: bool, shuffled: bool = False
) -> Rounded:
    num_out, num_in = weight.shape
    groups = num_in // group_size
    order = torch.arange(num_in) // group_size
    if shuffled:
        order = order[torch.randperm(num_in, generator=torch.Generator().manual_seed(0))]
    top = (1 << bits) - 1
    scales, zeros = torch.zeros(num_out, groups), torch.zeros(num_out, groups, dtype=torch.int64)
    for g in range(groups):
        part = weight[:, order == g]
        if symmetric:
            scales[:, g] = part.abs().amax(1) / (1 << (bits - 1))
            zeros[:, g] = 1 << (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, g] = (high - low) / top
            zeros[:, g] = (-low / scales[:, g]).round().clamp(1, top).long()
    scales = scales.half().float()
    levels = (weight / scales[:, order] + zeros[:, order]).round().clamp(0, top).long()
    return Rounded(levels, scales, zeros, order, bits)


def gptq_pieces(r: Rounded, zero_offset: int) -> Tensors:
    return {
        "qweight": words_of(r.levels.tolist(), r.bits).t().contiguous(),
        "qzeros": words_of((r.zeros - zero_offset).t().tolist(), r.bits),
        "scales": r.scales.t().half().contiguous(),
        "g_idx": r.order.int(),
    }


def awq_pieces(r: Rounded) -> Tensors:
    def shuffle(rows: list[list[int]]) -> list[list[int]]:
        return [[row[at + i] for at in range(0, len(row), 8) for i in AWQ_ORDER] for row in rows]

    return {
        "qweight": words_of(shuffle(r.levels.t().tolist()), 4),
        "qzeros": words_of(shuffle(r.zeros.t().tolist()), 4),
        "scales": r.scales.t().half().contiguous(),
    }


def packed_pieces(r: Rounded, symmetric: bool, has_order: bool) -> Tensors:
    pieces = {
        "weight_packed": words_of(r.levels.tolist(), r.bits),
        "weight_scale": r.scales.half(),
        "weight_shape": torch.tensor(r.levels.shape),
    }
    if not symmetric:
        pieces["weight_zero_point"] = words_of(r.zeros.t().tolist(), r.bits).t().contiguous()
    if has_order:
        pieces["weight_g_idx"] = r.order.int()
    return pieces


def int8_pieces(r: Rounded) -> Tensors:
    return {"weight": (r.levels - 128).to(torch.int8), "weight_scale": r.scales.half()}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


Encode = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A weight -> its pieces, and the weight that they mean."""


def make_quantized(
    folder: Path, encode: Encode, quantization: dict[str, Any], **overrides: Any
) -> tuple[Path, Path]:
    """(the quantised checkpoint, the dense one that means the same)."""
    dense = make_tiny_model(folder / "dense", **overrides)
    tensors = load_file(dense / "model.safetensors")
    pieces: Tensors = {}
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        if last == "weight" and layer.rpartition(".")[2] in _LINEAR:
            stored, tensors[name] = encode(tensor.float())
            pieces |= {f"{layer}.{piece}": value for piece, value in stored.items()}
        else:
            pieces[name] = tensor.clone()
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    quantized = shutil.copytree(dense, folder / "quantized")
    save_file(pieces, quantized / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = quantization
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, dense
