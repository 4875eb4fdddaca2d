"""A decoder's config, in the terms of Baton's forward. It names no family."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from baton.types import KEY_VALUE, LATENT
from engine.quantization.config import QuantizationConfig

DTYPES = ("float32", "bfloat16", "float16")
#: Config field: context length, in tokens, of the model's first training.
ORIGINAL_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its type and its parameters as transformers names them."""

    rope_type: str
    theta: float
    parameters: tuple[tuple[str, Any], ...] = ()
    """Sorted (name, value) pairs, rope_type and rope_theta included."""

    @property
    def factor(self) -> float:
        return float(dict(self.parameters).get("factor") or 1.0)

    @property
    def original_length(self) -> int:
        """Context length of the first training, in tokens. Raises KeyError for types without
        one."""
        return int(dict(self.parameters)[ORIGINAL_LENGTH])


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Names of an MLP's linear layers in a checkpoint, relative to the MLP."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in a checkpoint, relative to a layer: the router, the folder of all experts, and the
    parts of one expert."""

    router: str = "mlp.gate"
    folder: str = "mlp.experts"
    parts: MlpNames = MlpNames()


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts. See baton_kernels.layer.Routing.

    layers: for each layer, whether its MLP is a mixture. shared_size: width of the shared experts
    that process all tokens; 0 if there are none.
    """

    layers: tuple[bool, ...]
    num_experts: int
    num_chosen: int
    intermediate_size: int
    is_sigmoid: bool = False
    is_normalised: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_top: int = 2
    shared_size: int = 0
    is_stacked: bool = False
    """Whether the checkpoint stores a layer's experts in one tensor: see
    engine.torch.stacked_experts."""
    names: ExpertNames = field(default=ExpertNames(), repr=False)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Widths of multi-head latent attention: see baton_kernels.layer.LatentAttention.

    rank: width of the latent. query_rank: width of the compressed queries; None if queries are
    projected from the hidden states. rope_dim: rotated dimensions of a head's query, and of the key
    shared by all heads. plain_dim: unrotated dimensions of a head's query. value_dim: width of a
    head's result. is_interleaved: whether RoPE rotates adjacent dimensions together.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class Traits:
    """Differences of a family's layers from Llama's. The defaults are Llama's."""

    activation: str = "silu"
    """Activation of the MLP's gate: see baton_kernels.layer.Mlp."""
    norms: str = "before"
    """Position of the norms of attention and MLP: before, after, or around."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    has_wide_norms: bool = False
    """Whether norms are rounded after they are multiplied by their weights."""
    has_whole_qk_norm: bool = False
    """Whether one norm covers the queries (and another the keys) of all heads together."""
    attention_scale: float = 1.0
    """Factor of attention scores."""
    attention_softcap: float | None = None
    """Soft cap of attention scores: see baton_kernels.paged_attention.ScoreTerms."""
    logit_softcap: float | None = None
    """Soft cap c of logits: x becomes c * tanh(x / c)."""
    embedding_scale: float = 1.0
    rotary_dim: int | None = None
    """Rotated dimensions of each head, counted from its first; None: all."""
    window_rope: RopeConfig | None = None
    """Rotary embedding of windowed layers, if it differs from that of the others."""
    is_fused: bool = False
    """Whether the checkpoint stores queries, keys and values in one tensor, and gate and up in
    one."""
    experts: ExpertsConfig | None = None
    num_unused_layers: int = 0
    """Layers after the last one that the decoder does not run, such as MTP layers."""
    has_sinks: bool = False
    """Whether each attention head has a sink: see baton_kernels.paged_attention.ScoreTerms."""
    latent: LatentConfig | None = None
    """Widths of multi-head latent attention; None for attention over keys and values."""


_PLAIN = Traits()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder that Baton's own code runs. num_kv_heads, head_dim: as in KvLayout; with latent
    attention 1 and the width of the cached row."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Attention window of each layer in tokens, including the new token; None: full attention."""
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    dtype: str
    quantization: QuantizationConfig | None = None
    traits: Traits = field(default=_PLAIN, repr=False)

    @property
    def kv_parts(self) -> tuple[str, ...]:
        """See baton.types.KvLayout."""
        return KEY_VALUE if self.traits.latent is None else LATENT

    @property
    def rope_width(self) -> int:
        """Width that the rotary embedding applies to: a head, or the rotated part of a latent
        head."""
        latent = self.traits.latent
        return self.head_dim if latent is None else latent.rope_dim

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of each head."""
        return self.traits.rotary_dim or self.rope_width

    @property
    def derived_max_len(self) -> int:
        """Maximum context length that the model was made for, in tokens; for longrope, the length
        covered by its short factors."""
        longest = self.max_position_embeddings
        if self.rope.rope_type in ("linear", "dynamic"):
            return int(longest * self.rope.factor)
        if self.rope.rope_type in ("yarn", "dynamic_yarn"):
            original = dict(self.rope.parameters).get(ORIGINAL_LENGTH)
            return max(longest, int((original or longest) * self.rope.factor))
        if self.rope.rope_type == "longrope":
            return min(longest, self.rope.original_length)
        return longest

    @property
    def longest_len(self) -> int:
        """Maximum context length that a user may set, in tokens."""
        is_longrope = self.rope.rope_type == "longrope"
        return self.max_position_embeddings if is_longrope else self.derived_max_len

    def for_length(self, max_model_len: int) -> ModelConfig:
        """The config for contexts of at most max_model_len tokens.

        A longrope model uses its long factors for all tokens if max_model_len exceeds its original
        length, as in vLLM: cached KV cannot change factors when a sequence grows.
        """
        if self.rope.rope_type != "longrope" or max_model_len <= self.rope.original_length:
            return self
        parameters = tuple(sorted((*self.rope.parameters, ("is_long", True))))
        return replace(self, rope=replace(self.rope, parameters=parameters))

    def of_layers(self, layers: range) -> ModelConfig:
        """The config of a model of these consecutive layers, counted from 0."""
        own, traits = slice(layers.start, layers.stop), self.traits
        if experts := traits.experts:
            traits = replace(traits, experts=replace(experts, layers=experts.layers[own]))
        return replace(self, num_layers=len(layers), windows=self.windows[own], traits=traits)

    @property
    def kv_digest(self) -> str:
        """Digest of all settings that define the meaning of KV, except the weights."""
        text = repr(replace(self, dtype=""))
        if self.traits != _PLAIN:  # families without traits keep the digest of earlier releases
            text += repr(self.traits)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
