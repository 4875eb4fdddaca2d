"""A decoder's config, in the terms that Baton's forward uses. No family is named here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from baton.types import KEY_VALUE, LATENT
from engine.quantization.config import QuantizationConfig

DTYPES = ("float32", "bfloat16", "float16")
#: The context that a model was first trained for.
ORIGINAL_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its type and its parameters as transformers names them."""

    rope_type: str
    theta: float
    parameters: tuple[tuple[str, Any], ...] = ()
    """Sorted (name, value) pairs, rope_type and rope_theta among them."""

    @property
    def factor(self) -> float:
        return float(dict(self.parameters).get("factor") or 1.0)

    @property
    def original_length(self) -> int:
        """Only for types that have one."""
        return int(dict(self.parameters)[ORIGINAL_LENGTH])


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Names in a checkpoint of an MLP's linear layers, below the MLP's own."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in a checkpoint, below a layer's: of the router, of the folder with a folder for each
    expert, and of an expert's parts."""

    router: str = "mlp.gate"
    folder: str = "mlp.experts"
    parts: MlpNames = MlpNames()


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts, where a layer's MLP is one. See baton_kernels.layer.Routing.

    layers: whether the MLP of each is one. shared_size: width of what all tokens go through
    besides, 0 if nothing.
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
    """Whether the checkpoint has the experts of a layer in one tensor: see
    engine.torch.stacked_experts."""
    names: ExpertNames = field(default=ExpertNames(), repr=False)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Widths of multi-head latent attention: see baton_kernels.layer.LatentAttention.

    rank: of the latent; query_rank: what queries are made of, None for the hidden states; rope_dim:
    of a head's query and of the key that all heads share, rotated; plain_dim: of a head's query
    besides; value_dim: of a head's results. is_interleaved: whether RoPE turns neighbours together.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class Traits:
    """Differences of a family's layers from a Llama's, which the defaults are."""

    activation: str = "silu"
    """The gates': see baton_kernels.layer.Mlp."""
    norms: str = "before"
    """Where a layer's parts have their norms: before, after, or around them."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    has_wide_norms: bool = False
    """Whether norms are rounded after they are multiplied by their weights."""
    has_whole_qk_norm: bool = False
    """Whether queries, and keys, of all heads have one norm."""
    attention_scale: float = 1.0
    """What attention scores are multiplied by."""
    attention_softcap: float | None = None
    """The scores': see baton_kernels.paged_attention.ScoreTerms."""
    logit_softcap: float | None = None
    """c, where logits x become c * tanh(x / c)."""
    embedding_scale: float = 1.0
    rotary_dim: int | None = None
    """Number of dimensions of each head, from its first, that are rotated; None for all."""
    window_rope: RopeConfig | None = None
    """The rotary embedding of layers with a window, if not that of the others."""
    is_fused: bool = False
    """Whether the checkpoint has queries, keys and values in one tensor, and gate and up."""
    experts: ExpertsConfig | None = None
    num_unused_layers: int = 0
    """Layers that the checkpoint has after the last one, for other uses."""
    has_sinks: bool = False
    """Whether each head of attention has a sink: see baton_kernels.paged_attention.ScoreTerms."""
    latent: LatentConfig | None = None
    """Multi-head latent attention's widths; None for attention over keys and values."""


_PLAIN = Traits()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of a family that Baton's own code runs. Windows are in tokens, None for full
    attention. num_kv_heads, head_dim: of KvLayout, and so of one row with latent attention."""

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
    """Per layer: how many positions a token sees, itself included."""
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
        """Elements of what a rotary embedding is made for: a head, or the part that is rotated."""
        latent = self.traits.latent
        return self.head_dim if latent is None else latent.rope_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that are rotated."""
        return self.traits.rotary_dim or self.rope_width

    @property
    def derived_max_len(self) -> int:
        """The longest context that the model was made for, in tokens; of a longrope model that of
        its short factors."""
        longest = self.max_position_embeddings
        if self.rope.rope_type in ("linear", "dynamic"):
            return int(longest * self.rope.factor)
        if self.rope.rope_type == "yarn":
            original = dict(self.rope.parameters).get(ORIGINAL_LENGTH)
            return max(longest, int((original or longest) * self.rope.factor))
        if self.rope.rope_type == "longrope":
            return min(longest, self.rope.original_length)
        return longest

    @property
    def longest_len(self) -> int:
        """The longest context that may be asked for."""
        is_longrope = self.rope.rope_type == "longrope"
        return self.max_position_embeddings if is_longrope else self.derived_max_len

    def for_length(self, max_model_len: int) -> ModelConfig:
        """The same for contexts up to that. A longrope model rotates all tokens by its long factors
        where they may be longer than its original length, as vLLM does: KV is one or the other, so
        that it cannot follow each sequence's length."""
        if self.rope.rope_type != "longrope" or max_model_len <= self.rope.original_length:
            return self
        parameters = tuple(sorted((*self.rope.parameters, ("is_long", True))))
        return replace(self, rope=replace(self.rope, parameters=parameters))

    @property
    def kv_digest(self) -> str:
        """A digest of every setting on which the meaning of KV depends, but the weights."""
        text = repr(replace(self, dtype=""))
        if self.traits != _PLAIN:  # families that have none keep the digest of earlier releases
            text += repr(self.traits)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
