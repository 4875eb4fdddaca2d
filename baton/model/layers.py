"""Which parts a model's layers are made of: its config as a composition of baton_kernels.layer.

A family of models is told apart here and nowhere below: what follows (parameters, packing, ranks,
quantising, the memory plan, decoders) takes the description. A linear layer is described by where
it is in a checkpoint, and which of its outputs a rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.model.config import ModelConfig
from baton.model.shard import WHOLE, Shard
from baton_kernels.layer import Attention, AttentionShape, Layer, Mlp, Norm

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Source:
    """Rows `rows` of the `num_rows` that the tensors of a checkpoint's layer `name` have."""

    name: str
    rows: range
    num_rows: int

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor [num_rows, ...]; itself if they are all."""
        return whole if len(self.rows) == self.num_rows else whole[self.rows.start : self.rows.stop]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer: the outputs of those in the checkpoint, one below the other."""

    sources: tuple[Source, ...]
    num_in: int
    has_bias: bool

    @property
    def num_out(self) -> int:
        return sum(len(source.rows) for source in self.sources)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the layers in the checkpoint."""
        return tuple(source.name for source in self.sources)


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """A norm's weight [size]. name: of its tensor."""

    name: str
    size: int


LayerSpec = Layer[LinearSpec, VectorSpec]


def describe_layers(config: ModelConfig, shard: Shard = WHOLE) -> tuple[LayerSpec, ...]:
    """The layers of a model, as much of them as the rank holds."""
    return tuple(_layer(config, shard, index) for index in range(config.num_layers))


def describe_output(config: ModelConfig, shard: Shard = WHOLE) -> LinearSpec:
    """The layer that makes logits; its tensor is the embeddings' where they are tied."""
    source = Source("lm_head", shard.part(config.vocab_size), config.vocab_size)
    return LinearSpec((source,), config.hidden_size, has_bias=False)


def describe_norm(config: ModelConfig) -> Norm[VectorSpec]:
    """Of the last layer's results."""
    return Norm(VectorSpec("model.norm.weight", config.hidden_size), config.rms_norm_eps)


def _layer(config: ModelConfig, shard: Shard, index: int) -> LayerSpec:
    name, hidden, dim = f"model.layers.{index}", config.hidden_size, config.head_dim
    inner, num_q, num_kv = (
        config.intermediate_size,
        config.num_heads * dim,
        config.num_kv_heads * dim,
    )
    heads, kv_heads = shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads)

    def norm(part: str, size: int) -> Norm[VectorSpec]:
        return Norm(VectorSpec(f"{name}.{part}.weight", size), config.rms_norm_eps)

    def source(part: str, num_rows: int) -> Source:
        return Source(f"{name}.{part}", shard.part(num_rows), num_rows)

    def kv_source(part: str) -> Source:
        return Source(f"{name}.{part}", range(kv_heads.start * dim, kv_heads.stop * dim), num_kv)

    qkv = (
        source("self_attn.q_proj", num_q),
        kv_source("self_attn.k_proj"),
        kv_source("self_attn.v_proj"),
    )
    output = (source("self_attn.o_proj", hidden),)
    gate_up = (source("mlp.gate_proj", inner), source("mlp.up_proj", inner))
    down = (source("mlp.down_proj", hidden),)
    return Layer(
        before_attention=norm("input_layernorm", hidden),
        attention=Attention(
            AttentionShape(len(heads), len(kv_heads), dim, dim**-0.5, config.windows[index]),
            LinearSpec(qkv, hidden, config.has_qkv_bias),
            norm("self_attn.q_norm", dim) if config.has_qk_norm else None,
            norm("self_attn.k_norm", dim) if config.has_qk_norm else None,
            LinearSpec(output, num_q, config.has_output_bias),
        ),
        after_attention=None,
        before_mlp=norm("post_attention_layernorm", hidden),
        mlp=Mlp(
            LinearSpec(gate_up, hidden, config.has_mlp_bias),
            LinearSpec(down, inner, config.has_mlp_bias),
        ),
        after_mlp=None,
    )
