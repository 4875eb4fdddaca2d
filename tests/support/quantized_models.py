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
    *("qkv_proj", "gate_up_proj", "w1", "w2", "w3"),
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


def gptq(bits: int, zero_offset: int, shuffled: bool) -> Encode:
    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rounded = round_weight(weight, bits, GROUP_SIZE, symmetric=False, shuffled=shuffled)
        return gptq_pieces(rounded, zero_offset), rounded.dense()

    return encode


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rounded = round_weight(weight, 4, GROUP_SIZE, symmetric=False)
    return awq_pieces(rounded), rounded.dense()


def packed(bits: int, symmetric: bool, shuffled: bool = False) -> Encode:
    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rounded = round_weight(weight, bits, GROUP_SIZE, symmetric, shuffled)
        return packed_pieces(rounded, symmetric, shuffled), rounded.dense()

    return encode


def float8_in_blocks(num_rows: int, num_columns: int) -> Encode:
    """As DeepSeek and Qwen publish them: blocks of weights have a scale, the last ones of fewer."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows = [part.split(num_columns, 1) for part in weight.split(num_rows)]
        scales = torch.tensor([[float(block.abs().max()) / 448 for block in row] for row in rows])
        numbers = [
            torch.cat([block / scale for block, scale in zip(row, of_row, strict=True)], 1)
            for row, of_row in zip(rows, scales, strict=True)
        ]
        codes = torch.cat(numbers).to(torch.float8_e4m3fn)
        dense = codes.float()
        for i, part in enumerate(dense.split(num_rows)):
            for j, block in enumerate(part.split(num_columns, 1)):
                block.mul_(scales[i, j])
        return {"weight": codes, "weight_scale_inv": scales}, dense

    return encode


def in_blocks(*sizes: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(sizes),
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm"}
GROUP = {"type": "int", "strategy": "group", "group_size": GROUP_SIZE}

#: By the tool's or format's name: how a weight is stored, and what config.json says of it.
FORMATS: dict[str, tuple[Encode, dict[str, Any]]] = {
    "gptq": (gptq(4, 1, shuffled=False), GPTQ),
    "awq": (awq, AWQ),
    "compressed-tensors": (
        packed(4, True),
        compressed("pack-quantized", num_bits=4, symmetric=True, **GROUP),
    ),
    "fp8": (float8_in_blocks(24, 16), in_blocks(24, 16)),
}


def make_quantized(
    folder: Path, encode: Encode, quantization: dict[str, Any], **overrides: Any
) -> tuple[Path, Path]:
    """(the quantised checkpoint, the dense one that means the same)."""
    dense = make_tiny_model(folder / "dense", **overrides)
    return quantize(dense, folder / "quantized", encode, quantization), dense


def quantize(
    dense: Path,
    folder: Path,
    encode: Encode,
    quantization: dict[str, Any],
    is_linear: Callable[[str, torch.Tensor], bool] = lambda name, _: is_projection(name),
) -> Path:
    """The checkpoint `dense` in another format, as a new one in `folder`; `dense` is given the very
    weights that it means. is_linear: of a tensor's name and itself, whether it is quantised."""
    tensors = load_file(dense / "model.safetensors")
    pieces: Tensors = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if is_linear(name, tensor):
            stored, tensors[name] = encode(tensor.float())
            pieces |= {f"{layer}.{piece}": value for piece, value in stored.items()}
        else:
            pieces[name] = tensor.clone()
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(dense, folder)
    save_file(pieces, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def is_projection(name: str) -> bool:
    """Whether it is the weight of a linear layer, but the output layer's and a router's."""
    layer, _, last = name.rpartition(".")
    return last == "weight" and layer.rpartition(".")[2] in _LINEAR


def of_transposed(encode: Encode) -> Encode:
    """For models that keep layer weights as [in, out]: the stored format is the same."""

    def encode_turned(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        pieces, dense = encode(weight.t().contiguous())
        return pieces, dense.t().contiguous()

    return encode_turned
