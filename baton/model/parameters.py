"""A decoder's parameters, fused as the forward wants them, before they are packed, and where each
tensor of a checkpoint goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from baton.model.config import ModelConfig
from baton.model.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x weight^T + bias; weight [out, in], bias [out] or none."""

    weight: torch.Tensor
    bias: torch.Tensor | None


#: The linear layers of a checkpoint that each of a decoder layer's fused ones is made of, from the
#: top.
PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def layer_name(index: int, part: str) -> str:
    """The name in a checkpoint of a part of decoder layer `index`."""
    return f"model.layers.{index}.{part}"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `rows` of the `num_rows` that a checkpoint's tensor has."""

    rows: range
    num_rows: int


@dataclass(frozen=True, slots=True)
class Target:
    """Where a part of a checkpoint's tensor goes: `tensor` has as many rows as the part."""

    tensor: torch.Tensor
    part: Part

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor in the checkpoint."""
        return torch.Size((self.part.num_rows, *self.tensor.shape[1:]))

    def fill(self, whole: torch.Tensor) -> None:
        """Take the part from the checkpoint's tensor."""
        self.tensor.copy_(whole[self.part.rows.start : self.part.rows.stop])


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One decoder layer. qkv stacks queries, keys and values; gate_up stacks gate and up."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Parameters:
    """All parameters of a rank. lm_head [vocab, hidden] is of embeddings itself where they are
    tied.

    layers: a list, because packing takes them out of it one by one. parts: by the checkpoint's
    names of linear layers, what of their outputs is here.
    """

    embeddings: torch.Tensor
    layers: list[LayerParameters]
    norm: torch.Tensor
    lm_head: torch.Tensor
    is_tied: bool
    parts: Mapping[str, Part]

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Each tensor that a checkpoint must have, and the memory that it is to fill."""
        yield "model.embed_tokens.weight", _whole(self.embeddings)
        yield "model.norm.weight", _whole(self.norm)
        if not self.is_tied:
            yield "lm_head.weight", Target(self.lm_head, self.parts["lm_head"])
        for index, layer in enumerate(self.layers):
            for name, target in _layer_targets(layer, self.parts):
                yield layer_name(index, name), target

    def linear_names(self) -> frozenset[str]:
        """The linear layers of the checkpoint, by name."""
        parts = [part for names in PARTS.values() for part in names]
        names = {layer_name(i, part) for i in range(len(self.layers)) for part in parts}
        return frozenset(names if self.is_tied else names | {"lm_head"})


def empty_parameters(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    of_linears: torch.device | None = None,
) -> Parameters:
    """Parameters of the config's shapes, as many of them as the rank holds, not yet filled.

    of_linears: where linear layers are until they are packed, if not on `device`.
    """
    parts = _parts(config, shard)

    def empty(*shape: int, on: torch.device = device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=on)

    def linear(field: str, num_in: int, has_bias: bool) -> Linear:
        num_out = sum(len(parts[name].rows) for name in PARTS[field])
        bias = empty(num_out, on=linears) if has_bias else None
        return Linear(empty(num_out, num_in, on=linears), bias)

    linears = of_linears or device
    hidden, dim = config.hidden_size, config.head_dim
    layers = [
        LayerParameters(
            input_norm=empty(hidden),
            qkv=linear("qkv", hidden, config.has_qkv_bias),
            q_norm=empty(dim) if config.has_qk_norm else None,
            k_norm=empty(dim) if config.has_qk_norm else None,
            output=linear("output", config.num_heads * dim, config.has_output_bias),
            post_norm=empty(hidden),
            gate_up=linear("gate_up", hidden, config.has_mlp_bias),
            down=linear("down", config.intermediate_size, config.has_mlp_bias),
        )
        for _ in range(config.num_layers)
    ]
    embeddings = empty(config.vocab_size, hidden)
    vocab = parts["lm_head"].rows
    lm_head = (
        embeddings[vocab.start : vocab.stop]
        if config.is_tied
        else empty(len(vocab), hidden, on=linears)
    )
    return Parameters(embeddings, layers, empty(hidden), lm_head, config.is_tied, parts)


def _parts(config: ModelConfig, shard: Shard) -> dict[str, Part]:
    """What of the outputs of each linear layer the rank holds."""

    def part(num_rows: int) -> Part:
        return Part(shard.part(num_rows), num_rows)

    dim = config.head_dim
    kv = shard.kv_heads(config.num_kv_heads)
    kv_part = Part(range(kv.start * dim, kv.stop * dim), config.num_kv_heads * dim)
    return {
        "self_attn.q_proj": part(config.num_heads * dim),
        "self_attn.k_proj": kv_part,
        "self_attn.v_proj": kv_part,
        "self_attn.o_proj": part(config.hidden_size),
        "mlp.gate_proj": part(config.intermediate_size),
        "mlp.up_proj": part(config.intermediate_size),
        "mlp.down_proj": part(config.hidden_size),
        "lm_head": part(config.vocab_size),
    }


def _whole(tensor: torch.Tensor) -> Target:
    return Target(tensor, Part(range(tensor.shape[0]), tensor.shape[0]))


def _layer_targets(
    layer: LayerParameters, parts: Mapping[str, Part]
) -> Iterator[tuple[str, Target]]:
    yield "input_layernorm.weight", _whole(layer.input_norm)
    yield "post_attention_layernorm.weight", _whole(layer.post_norm)
    for field, names in PARTS.items():
        yield from _split(getattr(layer, field), {name: parts[name] for name in names})
    if layer.q_norm is not None and layer.k_norm is not None:
        yield "self_attn.q_norm.weight", _whole(layer.q_norm)
        yield "self_attn.k_norm.weight", _whole(layer.k_norm)


def _split(linear: Linear, parts: Mapping[str, Part]) -> Iterator[tuple[str, Target]]:
    """What a fused linear is made of, by their names in a checkpoint. The tensors are views."""
    sizes = [len(part.rows) for part in parts.values()]
    for (name, part), rows in zip(
        parts.items(), linear.weight.split_with_sizes(sizes), strict=True
    ):
        yield f"{name}.weight", Target(rows, part)
    if linear.bias is not None:
        for (name, part), rows in zip(
            parts.items(), linear.bias.split_with_sizes(sizes), strict=True
        ):
            yield f"{name}.bias", Target(rows, part)
