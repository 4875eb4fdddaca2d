"""A decoder's parameters, fused as the forward wants them, before they are packed, and where each tensor of a checkpoint goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from baton.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x weight^T + bias; weight [out, in], bias [out] or none."""

    weight: torch.Tensor
    bias: torch.Tensor | None


#: The linear layers of a checkpoint that each of a decoder layer's fused ones is made of, from the top.
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
    """All parameters. lm_head [vocab, hidden] is embeddings itself where they are tied.

    layers: a list, because packing takes them out of it one by one.
    """

    embeddings: torch.Tensor
    layers: list[LayerParameters]
    norm: torch.Tensor
    lm_head: torch.Tensor
    is_tied: bool

    def targets(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor that a checkpoint must have, and the memory it is to fill."""
        yield "model.embed_tokens.weight", self.embeddings
        yield "model.norm.weight", self.norm
        if not self.is_tied:
            yield "lm_head.weight", self.lm_head
        for index, layer in enumerate(self.layers):
            for name, tensor in _layer_targets(layer):
                yield layer_name(index, name), tensor

    def linear_names(self) -> frozenset[str]:
        """The linear layers of the checkpoint, by name."""
        parts = [part for names in PARTS.values() for part in names]
        names = {layer_name(i, part) for i in range(len(self.layers)) for part in parts}
        return frozenset(names if self.is_tied else names | {"lm_head"})


def empty_parameters(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Parameters:
    """Parameters of the config's shapes, not yet filled."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(num_out: int, num_in: int, has_bias: bool) -> Linear:
        return Linear(empty(num_out, num_in), empty(num_out) if has_bias else None)

    hidden, dim = config.hidden_size, config.head_dim
    num_q, num_kv = config.num_heads * dim, config.num_kv_heads * dim
    layers = [
        LayerParameters(
            input_norm=empty(hidden),
            qkv=linear(num_q + 2 * num_kv, hidden, config.has_qkv_bias),
            q_norm=empty(dim) if config.has_qk_norm else None,
            k_norm=empty(dim) if config.has_qk_norm else None,
            output=linear(hidden, num_q, config.has_output_bias),
            post_norm=empty(hidden),
            gate_up=linear(2 * config.intermediate_size, hidden, config.has_mlp_bias),
            down=linear(hidden, config.intermediate_size, config.has_mlp_bias),
        )
        for _ in range(config.num_layers)
    ]
    embeddings = empty(config.vocab_size, hidden)
    lm_head = embeddings if config.is_tied else empty(config.vocab_size, hidden)
    return Parameters(embeddings, layers, empty(hidden), lm_head, config.is_tied)


def _layer_targets(layer: LayerParameters) -> Iterator[tuple[str, torch.Tensor]]:
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.post_norm
    num_q = layer.output.weight.shape[1]
    num_kv = (layer.qkv.weight.shape[0] - num_q) // 2
    num_inter = layer.down.weight.shape[1]
    yield from _split(layer.qkv, PARTS["qkv"], (num_q, num_kv, num_kv))
    yield from _split(layer.output, PARTS["output"], (layer.output.weight.shape[0],))
    yield from _split(layer.gate_up, PARTS["gate_up"], (num_inter, num_inter))
    yield from _split(layer.down, PARTS["down"], (layer.down.weight.shape[0],))
    if layer.q_norm is not None and layer.k_norm is not None:
        yield "self_attn.q_norm.weight", layer.q_norm
        yield "self_attn.k_norm.weight", layer.k_norm


def _split(
    linear: Linear, names: tuple[str, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts of a fused linear, by their names in a checkpoint. The parts are views."""
    for name, part in zip(names, linear.weight.split_with_sizes(sizes), strict=True):
        yield f"{name}.weight", part
    if linear.bias is not None:
        for name, part in zip(names, linear.bias.split_with_sizes(sizes), strict=True):
            yield f"{name}.bias", part
