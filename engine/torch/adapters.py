"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) in PEFT's format: y = W x + s B A x for
each adapted linear layer, with s = lora_alpha / r, or lora_alpha / sqrt(r) (rank-stabilised, arXiv
2312.03732).

Adapters are loaded beside the model and not merged into its weights: each row of a step uses its
own adapter, or none. Experts and the heads of latent attention have additions of one shape, which
run as grouped linear layers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from baton.errors import AdapterError
from baton_kernels.cpu.memory import Allocate, Arena
from baton_kernels.experts import GroupedLinear, headwise_linear
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
#: Parameters that hold all experts of a layer. If two are adapted, PEFT wraps the wrapped module
#: once more, so that names do not say which is which.
_STACK = re.compile(r"^model\.layers\.(?P<index>\d+)\..+\.experts(\.base_layer)?$")
_EMBEDDINGS = "model.embed_tokens"
#: Ranks are zero-padded to a multiple of this, which all kernels accept.
_RANK_STEP = 8


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's addition to a linear layer: up(down(x)); the scale is folded into `up`."""

    down: Linear
    up: Linear

    def add_to(self, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Add in place to some rows of y [all, num_out], of x [all, num_in]. rows: int64."""
        y[rows] = self.up(self.down(x[rows]), y[rows])

    def add_to_logits(self, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
        """The same for y in float32, whichever type x has."""
        y[rows] += self.up(self.down(x[rows]), None, torch.float32)


@dataclass(frozen=True, slots=True)
class LowRankTable:
    """An adapter's addition to the embeddings: up(down[id]). down: [vocab, rank]."""

    down: torch.Tensor
    up: Linear

    def add_to(self, y: torch.Tensor, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Add in place to some rows of y [all, hidden], of token_ids [all]. rows: int64."""
        y[rows] = self.up(F.embedding(token_ids[rows], self.down), y[rows])


@dataclass(frozen=True, slots=True)
class LowRankGroup:
    """An adapter's additions to linear layers of one shape, as LowRank; zero for unchanged ones."""

    down: GroupedLinear
    up: GroupedLinear

    def headwise(self, x: torch.Tensor) -> torch.Tensor:
        """The additions for x [rows, layers, num_in], each [:, i] to layer i: [rows, layers,
        num_out]."""
        return headwise_linear(headwise_linear(x, self.down), self.up)


@dataclass(frozen=True, slots=True)
class AdapterLayer(Layer[Any, None]):
    """The addition to each linear layer that runs by itself: an adapter's LowRank, or that of all
    adapters, see engine.torch.grouped_adapters; None for unchanged layers, and for those of groups.
    keys, values: to those of latent attention's heads; gate_up, down: to the experts'."""

    keys: LowRankGroup | None = None
    values: LowRankGroup | None = None
    gate_up: LowRankGroup | None = None
    down: LowRankGroup | None = None

    @property
    def has_groups(self) -> bool:
        """Whether layers of groups are changed."""
        groups = (self.keys, self.values, self.gate_up, self.down)
        return any(group is not None for group in groups)


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
    described = describe_layers(config)
    pairs = _unstack(folder, _read_pairs(folder, rank, described), described)
    packing = _Packing(folder, pairs, scale, dtype, device)
    layers = tuple(map(packing.layer, described))
    embeddings = packing.table(_EMBEDDINGS, config.vocab_size, config.hidden_size)
    output = packing.linear(describe_output(config)) if "lm_head" in pairs else None
    unknown = sorted(set(pairs) - packing.taken)
    if unknown:
        raise AdapterError(
            f"{folder}: it changes {unknown[0]!r}, which is none of this model's linear layers "
            "that an adapter may change (attention, MLPs, experts, embeddings, output, not "
            "routers); use an adapter trained on those of this model"
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


_Pairs = Mapping[str, Mapping[str, torch.Tensor]]


def _read_pairs(folder: Path, rank: int, layers: Sequence[LayerSpec]) -> _Pairs:
    """A [rank, num_in] and B [num_out, rank], by linear layer; of parameters that hold all experts
    A [experts * rank, num_in] and B [num_out, rank * experts]."""
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
        at, stacked = 0 if side == "A" else 1, _stacked(found["layer"], layers)
        wanted = rank if stacked is None else rank * len(stacked.experts)
        if tensor.dim() != 2 or tensor.shape[at] != wanted or not tensor.is_floating_point():
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


def _stacked(name: str, layers: Sequence[LayerSpec]) -> Experts[LinearSpec, VectorSpec] | None:
    """The experts that an adapted parameter holds; None for linear layers."""
    found = _STACK.match(name)
    if found is None or int(found["index"]) >= len(layers):
        return None
    mlp = layers[int(found["index"])].mlp
    return mlp if isinstance(mlp, Experts) else None


def _unstack(folder: Path, pairs: _Pairs, layers: Sequence[LayerSpec]) -> _Pairs:
    """Pairs by the linear layers of a checkpoint. Those of parameters that hold all experts of a
    layer (PEFT's target_parameters) are divided: A has a block of rows for each expert, and in B
    the experts' columns alternate."""
    apart: dict[str, Mapping[str, torch.Tensor]] = {}
    for name, pair in pairs.items():
        stacked = _stacked(name, layers)
        if stacked is None:
            apart[name] = pair
            continue
        shape, num = (len(pair["B"]), pair["A"].shape[1]), len(stacked.experts)
        both = [[expert.gate_up for expert in stacked.experts]]
        both.append([expert.down for expert in stacked.experts])
        specs = next((specs for specs in both if _stored_shape(specs[0]) == shape), None)
        if specs is None:
            wanted = " or ".join(str(list(_stored_shape(specs[0]))) for specs in both)
            raise AdapterError(
                f"{folder}: {name!r} changes experts of {list(shape)} outputs and inputs, but the "
                f"model has {wanted}; use an adapter of this model"
            )
        for i, spec in enumerate(specs):
            down, up, row = pair["A"].chunk(num)[i], pair["B"][:, i::num], 0
            for part, num_rows in _stored_rows(spec).items():
                apart[part] = {"A": down, "B": up[row : row + num_rows]}
                row += num_rows
    return apart


def _stored_rows(spec: LinearSpec) -> dict[str, int]:
    """Outputs of each of a checkpoint's layers."""
    return {source.name: source.num_rows for source in spec.sources}


def _stored_shape(spec: LinearSpec) -> tuple[int, int]:
    """Outputs and inputs of a checkpoint's layers that are one layer here."""
    return sum(_stored_rows(spec).values()), spec.num_in


class _Packing:
    """taken: names of the checkpoint's layers used so far."""

    def __init__(
        self,
        folder: Path,
        pairs: _Pairs,
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
        """Pack a layer's additions; routers have none."""
        linears = [linear for part in (layer.attention, layer.mlp) for linear in _single(part)]
        own = layer.map(lambda spec: self.linear(spec) if spec in linears else None, _nothing)
        groups = _groups(layer)
        return AdapterLayer(
            own.before_attention,
            own.attention,
            own.after_attention,
            own.before_mlp,
            own.mlp,
            own.after_mlp,
            keys=self.group(groups.keys),
            values=self.group(groups.values),
            gate_up=self.group(groups.gate_up),
            down=self.group(groups.down),
        )

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
        self.num_bytes += down.numel() * self._dtype.itemsize
        return LowRankTable(down.to(self._device, self._dtype), self._pack(up))

    def linear(self, spec: LinearSpec) -> LowRank | None:
        """Pack the additions to a fused linear layer."""
        found = self._factors(spec)
        return None if found is None else LowRank(*map(self._pack, found))

    def group(self, specs: Sequence[LinearSpec]) -> LowRankGroup | None:
        """Pack the additions to layers of one shape."""
        found = [self._factors(spec) for spec in specs]
        ranks = [len(factors[0]) for factors in found if factors is not None]
        if not ranks:
            return None
        downs, ups = [], []
        for spec, factors in zip(specs, found, strict=True):
            num_in, num_out = spec.num_in, spec.num_out
            if spec.is_transposed:
                num_in, num_out = num_out, num_in
            down, up = torch.zeros(max(ranks), num_in), torch.zeros(num_out, max(ranks))
            if factors is not None:
                rank = len(factors[0])
                down[:rank], up[:, :rank] = factors
            downs.append(down)
            ups.append(up)
        return LowRankGroup(self._pack_all(downs), self._pack_all(ups))

    def _factors(self, spec: LinearSpec) -> tuple[torch.Tensor, torch.Tensor] | None:
        """down [rank, num_in] and up [num_out, rank] of the additions to a fused linear layer: the
        A of its parts are stacked, once those that share it, and the B form a block-diagonal
        matrix."""
        names = [name for name in spec.names if name in self._pairs]
        if not names:
            return None
        factors = {id(self._pairs[name]["A"]): self._pairs[name]["A"] for name in names}
        total = -(-sum(map(len, factors.values())) // _RANK_STEP) * _RANK_STEP
        down, up = torch.zeros(total, spec.num_in), torch.zeros(spec.num_out, total)
        column, columns = 0, {}
        for key, factor in factors.items():
            columns[key] = slice(column, column + len(factor))
            column += len(factor)
        for name in names:
            own = columns[id(self._pairs[name]["A"])]
            row, rank = 0, own.stop - own.start
            for source in spec.sources:
                rows = slice(row, row + len(source.rows))
                row = rows.stop
                if source.name == name:
                    b = self._checked(name, "B", (source.num_rows, rank))
                    up[rows, own] = source.take(b) * self._scale
            down[own] = self._checked(name, "A", (rank, spec.num_in))
            self.taken.add(name)
        return (up.T, down.T) if spec.is_transposed else (down, up)

    def _checked(self, name: str, side: str, shape: tuple[int, int]) -> torch.Tensor:
        tensor = self._pairs[name][side]
        if tensor.shape != shape:
            raise AdapterError(
                f"{self._folder}: lora_{side} of {name!r} is {list(tensor.shape)}, but the model "
                f"makes it {list(shape)}; use an adapter of this model"
            )
        return tensor

    def _pack(self, weight: torch.Tensor) -> Linear:
        self.num_bytes += weight.numel() * self._dtype.itemsize
        return pack_linear(weight.to(self._device, self._dtype).contiguous(), None, self._allocate)

    def _pack_all(self, weights: Sequence[torch.Tensor]) -> GroupedLinear:
        """Equal neighbours, such as the A of all heads, are one layer."""
        linears: list[Linear] = []
        for i, weight in enumerate(weights):
            is_same = i > 0 and torch.equal(weight, weights[i - 1])
            linears.append(linears[-1] if is_same else self._pack(weight))
        return GroupedLinear(linears)


_Part = (
    Attention[LinearSpec, VectorSpec]
    | LatentAttention[LinearSpec, VectorSpec]
    | Mlp[LinearSpec]
    | Experts[LinearSpec, VectorSpec]
)


def _single(part: _Part) -> tuple[LinearSpec, ...]:
    """Linear layers that run by themselves and may be changed."""
    match part:
        case Attention():
            return part.qkv, part.output
        case Mlp():
            return part.gate_up, part.down
        case LatentAttention():
            down = () if part.query_down is None else (part.query_down,)
            return *down, part.query, part.latent, part.output
        case Experts():
            return () if part.shared is None else _single(part.shared)


class _Groups(NamedTuple):
    """Linear layers of one shape each, as in AdapterLayer; empty where a layer has none."""

    keys: tuple[LinearSpec, ...] = ()
    values: tuple[LinearSpec, ...] = ()
    gate_up: tuple[LinearSpec, ...] = ()
    down: tuple[LinearSpec, ...] = ()


def _groups(layer: LayerSpec) -> _Groups:
    groups = _Groups()
    if isinstance(layer.attention, LatentAttention):
        groups = groups._replace(keys=layer.attention.keys, values=layer.attention.values)
    if isinstance(layer.mlp, Experts):
        experts = layer.mlp.experts
        gate_up = tuple(expert.gate_up for expert in experts)
        groups = groups._replace(gate_up=gate_up, down=tuple(expert.down for expert in experts))
    return groups


def _nothing(_: VectorSpec) -> None:
    """Result for vectors, which adapters do not change."""


def _digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in (_CONFIG, _WEIGHTS):
        content = (folder / name).read_bytes()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()
