"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) in PEFT's format: y = W x + s B A x for
each adapted linear layer, with s = lora_alpha / r, or lora_alpha / sqrt(r) (rank-stabilised, arXiv
2312.03732).

Adapters are loaded beside the model and not merged into its weights: each row of a step uses its
own adapter, or none.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from baton.errors import AdapterError
from baton_kernels.cpu.memory import Allocate, Arena
from baton_kernels.layer import Attention, Experts, LatentAttention, Layer, Mlp
from baton_kernels.linear import Linear, pack_linear
from engine.families.config import ModelConfig
from engine.families.layers import (
    LayerSpec,
    LinearSpec,
    VectorSpec,
    describe_layers,
    describe_output,
)

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Settings of adapter_config.json that change the computation, with their supported (neutral)
#: values.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "modules_to_save": ([],),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "alpha_pattern": ({},),
    "rank_pattern": ({},),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "arrow_config": (),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "use_qalora": (False,),
    "megatron_config": (),
}
_NAME = re.compile(
    r"^base_model\.model\.(?P<layer>.+)\.lora_((?P<side>[AB])\.weight|embedding_(?P<table>[AB]))$"
)
_EMBEDDINGS = "model.embed_tokens"
#: Ranks are zero-padded to a multiple of this, which all kernels accept.
_RANK_STEP = 8


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's addition to a linear layer: up(down(x)); the scale is folded into `up`."""

    down: Linear
    up: Linear

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y + up(down(x)), for x [rows, num_in] and y [rows, num_out]."""
        return self.up(self.down(x), y)


@dataclass(frozen=True, slots=True)
class LowRankTable:
    """An adapter's addition to the embeddings: up(down[id]). down: [vocab, rank]."""

    down: torch.Tensor
    up: Linear

    def add(self, token_ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y + up(down[token_ids]), for token_ids [rows] and y [rows, hidden]."""
        return self.up(F.embedding(token_ids, self.down), y)


#: The adapter's addition to each linear layer; None for unchanged layers.
AdapterLayer = Layer[LowRank | None, None]


@dataclass(frozen=True, slots=True)
class Adapter:
    """digest: of its files; num_bytes: of its packed tensors. embeddings, output: additions to the
    embeddings, before their scale, and to the output layer, before its soft-cap; None if
    unchanged."""

    digest: str
    layers: tuple[AdapterLayer, ...]
    num_bytes: int
    embeddings: LowRankTable | None = None
    output: LowRank | None = None


def adapters_digest(adapters: Mapping[str, Adapter]) -> str:
    """Digest of all of a worker's adapters, by name; empty without adapters."""
    if not adapters:
        return ""
    lines = (f"{name}\0{adapter.digest}" for name, adapter in sorted(adapters.items()))
    return hashlib.blake2b("\0".join(lines).encode(), digest_size=16).hexdigest()


def load_adapter(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_rank: int
) -> Adapter:
    """Load the adapter in `folder` for the model of `config` that computes in `dtype` on `device`.

    Raises AdapterError if it cannot be read, belongs to another model, or uses unsupported
    settings.
    """
    raw = _read_config(folder)
    rank = _rank(folder, raw, max_rank)
    alpha = raw.get("lora_alpha", 8)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise AdapterError(f"{folder / _CONFIG}: lora_alpha={alpha!r}: must be a number")
    scale = alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)
    pairs = _read_pairs(folder, rank)
    packing = _Packing(folder, pairs, scale, dtype, device)
    layers = tuple(map(packing.layer, describe_layers(config)))
    embeddings = packing.table(_EMBEDDINGS, config.vocab_size, config.hidden_size)
    output = packing.linear(describe_output(config)) if "lm_head" in pairs else None
    unknown = sorted(set(pairs) - packing.taken)
    if unknown:
        raise AdapterError(
            f"{folder}: it changes {unknown[0]!r}, which is none of this model's linear layers "
            "that an adapter may change (attention, MLPs, embeddings, output, not experts or "
            "kv_b_proj); use an adapter trained on those of this model"
        )
    return Adapter(_digest(folder), layers, packing.num_bytes, embeddings, output)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise AdapterError(
            f"{folder}: no {_CONFIG}; give the folder of an adapter that PEFT saved"
        ) from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise AdapterError(f"{path}: not a JSON object")
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path}: peft_type={kind!r}: only LORA is supported")
    for name, harmless in _UNSUPPORTED.items():
        value = raw.get(name)
        if value is not None and value not in harmless:
            raise AdapterError(
                f"{path}: {name}={value!r} is not supported; merge the adapter into the model, and "
                "serve that"
            )
    return raw


def _rank(folder: Path, raw: Mapping[str, Any], max_rank: int) -> int:
    rank = raw.get("r", 8)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise AdapterError(f"{folder / _CONFIG}: r={rank!r}: must be a whole number from 1")
    if rank > max_rank:
        raise AdapterError(
            f"{folder / _CONFIG}: r={rank} is above --max-lora-rank={max_rank}; raise that"
        )
    return rank


def _read_pairs(folder: Path, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """A [rank, num_in] and B [num_out, rank], by linear layer."""
    path = folder / _WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from error
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _NAME.match(name)
        if found is None:
            raise AdapterError(
                f"{path}: tensor {name!r} is not supported: only lora_A and lora_B of linear "
                "layers and embeddings are; merge the adapter into the model, and serve that"
            )
        side = found["side"] or found["table"]
        at = 0 if side == "A" else 1
        if tensor.dim() != 2 or tensor.shape[at] != rank or not tensor.is_floating_point():
            raise AdapterError(
                f"{path}: tensor {name!r} is {list(tensor.shape)} of {tensor.dtype}, which is none "
                f"of rank r={rank}"
            )
        pairs.setdefault(found["layer"], {})[side] = tensor.float()
    for layer, pair in pairs.items():
        if len(pair) < 2:
            lacking = "B" if "A" in pair else "A"
            raise AdapterError(f"{path}: {layer!r} has no lora_{lacking}; the file is not whole")
    if not pairs:
        raise AdapterError(f"{path}: no lora_A or lora_B in it; it changes nothing")
    return pairs


class _Packing:
    """taken: names of the checkpoint's layers used so far."""

    def __init__(
        self,
        folder: Path,
        pairs: Mapping[str, Mapping[str, torch.Tensor]],
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._folder, self._pairs, self._scale = folder, pairs, scale
        self._dtype, self._device = dtype, device
        self._allocate: Allocate = Arena().take
        self.taken: set[str] = set()
        self.num_bytes = 0

    def layer(self, layer: LayerSpec) -> AdapterLayer:
        """Pack a layer's additions; routers and experts have none, nor have the heads' keys and
        values of latent attention."""
        linears = [linear for part in (layer.attention, layer.mlp) for linear in _adaptable(part)]
        return layer.map(lambda spec: self.linear(spec) if spec in linears else None, _nothing)

    def table(self, name: str, num_rows: int, width: int) -> LowRankTable | None:
        """Pack the additions to a table of num_rows rows of `width` elements."""
        if name not in self._pairs:
            return None
        rank = len(self._pairs[name]["A"])
        total = -(-rank // _RANK_STEP) * _RANK_STEP
        down, up = torch.zeros(num_rows, total), torch.zeros(width, total)
        down[:, :rank] = self._checked(name, "A", (rank, num_rows)).T
        up[:, :rank] = self._checked(name, "B", (width, rank)) * self._scale
        self.taken.add(name)
        self.num_bytes += (down.numel() + up.numel()) * self._dtype.itemsize
        return LowRankTable(down.to(self._device, self._dtype), self._pack(up))

    def linear(self, spec: LinearSpec) -> LowRank | None:
        """Pack the additions to a fused linear layer: the A of its parts are stacked, and the B
        form a block-diagonal matrix."""
        names = [name for name in spec.names if name in self._pairs]
        if not names:
            return None
        ranks = [len(self._pairs[name]["A"]) for name in names]
        total = -(-sum(ranks) // _RANK_STEP) * _RANK_STEP
        down, up = torch.zeros(total, spec.num_in), torch.zeros(spec.num_out, total)
        column = 0
        for name, rank in zip(names, ranks, strict=True):
            columns = slice(column, column + rank)
            row = 0
            for source in spec.sources:
                rows = slice(row, row + len(source.rows))
                row = rows.stop
                if source.name == name:
                    b = self._checked(name, "B", (source.num_rows, rank))
                    up[rows, columns] = source.take(b) * self._scale
            down[columns] = self._checked(name, "A", (rank, spec.num_in))
            column = columns.stop
            self.taken.add(name)
        self.num_bytes += (down.numel() + up.numel()) * self._dtype.itemsize
        return LowRank(self._pack(down), self._pack(up))

    def _checked(self, name: str, side: str, shape: tuple[int, int]) -> torch.Tensor:
        tensor = self._pairs[name][side]
        if tensor.shape != shape:
            raise AdapterError(
                f"{self._folder}: lora_{side} of {name!r} is {list(tensor.shape)}, but the model "
                f"makes it {list(shape)}; use an adapter of this model"
            )
        return tensor

    def _pack(self, weight: torch.Tensor) -> Linear:
        return pack_linear(weight.to(self._device, self._dtype), None, self._allocate)


def _adaptable(
    part: Attention[LinearSpec, VectorSpec]
    | LatentAttention[LinearSpec, VectorSpec]
    | Mlp[LinearSpec]
    | Experts[LinearSpec, VectorSpec],
) -> tuple[LinearSpec, ...]:
    match part:
        case Attention():
            return part.qkv, part.output
        case Mlp():
            return part.gate_up, part.down
        case LatentAttention():
            down = () if part.query_down is None else (part.query_down,)
            return *down, part.query, part.latent, part.output
        case Experts():
            return ()


def _nothing(_: VectorSpec) -> None:
    """Result for vectors, which adapters do not change."""


def _digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in (_CONFIG, _WEIGHTS):
        content = (folder / name).read_bytes()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()
