"""What a checkpoint's config.json says about a decoder, in the terms that Baton's forward uses.

The file is read as transformers reads it: the same defaults, the same precedence of old and new
spellings, the same types refused. tests/model/test_config_same_as_transformers.py compares the two;
importing transformers here would take longer than all the rest of a worker's start.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baton.errors import ModelError, UnsupportedModel, UnsupportedSetting
from baton.types import KEY_VALUE, LATENT
from engine.quantization.config import QuantizationConfig, parse_quantization

#: What baton_kernels.gated_activation.clamped_swiglu has, which is not imported here.
CLAMPED_SILU_ALPHA, CLAMPED_SILU_LIMIT = 1.702, 7.0

#: Types that a value may have. As in transformers, a whole number is no float, and a bool no
#: number.
_Types = tuple[type, ...]

_INT, _FLOAT, _BOOL, _TEXT = (int,), (float,), (bool,), (str,)
_INT_OR_NULL: _Types = (int, type(None))
_NUMBER_OR_NULL: _Types = (int, float, type(None))

#: Fields that all families have: their types, and their values where config.json leaves them out.
_COMMON: Mapping[str, tuple[_Types, Any]] = {
    "vocab_size": (_INT, 32000),
    "hidden_size": (_INT, 4096),
    "intermediate_size": (_INT, 11008),
    "num_hidden_layers": (_INT, 32),
    "num_attention_heads": (_INT, 32),
    "num_key_value_heads": (_INT_OR_NULL, 32),
    "head_dim": (_INT_OR_NULL, None),
    "hidden_act": (_TEXT, "silu"),
    "max_position_embeddings": (_INT, 32768),
    "rms_norm_eps": (_FLOAT, 1e-6),
    "tie_word_embeddings": (_BOOL, False),
    "rope_parameters": ((dict, type(None)), None),
}
_WINDOWED: Mapping[str, tuple[_Types, Any]] = {
    "use_sliding_window": (_BOOL, False),
    "sliding_window": (_INT_OR_NULL, 4096),
    "max_window_layers": (_INT, 28),
}
_QWEN: Mapping[str, tuple[_Types, Any]] = {
    **_COMMON,
    **_WINDOWED,
    "vocab_size": (_INT, 151936),
    "intermediate_size": (_INT, 22016),
}

_GEMMA: Mapping[str, tuple[_Types, Any]] = {
    **_COMMON,
    "vocab_size": (_INT, 256000),
    "hidden_size": (_INT, 2304),
    "intermediate_size": (_INT, 9216),
    "num_hidden_layers": (_INT, 26),
    "num_attention_heads": (_INT, 8),
    "num_key_value_heads": (_INT, 4),
    "head_dim": (_INT, 256),
    "hidden_act": (_TEXT, "gelu_pytorch_tanh"),
    "max_position_embeddings": (_INT, 8192),
    "tie_word_embeddings": (_BOOL, True),
}
_LAYER_TYPES = {"layer_types": ((list, type(None)), None)}
_LATENT: Mapping[str, tuple[_Types, Any]] = {
    **_COMMON,
    "num_key_value_heads": (_INT_OR_NULL, None),
    "kv_lora_rank": (_INT, 512),
    "q_lora_rank": (_INT_OR_NULL, 1536),
    "qk_nope_head_dim": (_INT, 128),
    "qk_rope_head_dim": (_INT, 64),
    "v_head_dim": (_INT, 128),
    "attention_bias": (_BOOL, False),
    "n_routed_experts": (_INT, 64),
    "num_experts_per_tok": (_INT_OR_NULL, None),
    "n_shared_experts": (_INT, 2),
    "moe_intermediate_size": (_INT, 1407),
    "routed_scaling_factor": (_FLOAT, 1.0),
    "first_k_dense_replace": (_INT_OR_NULL, 0),
    "n_group": (_INT_OR_NULL, None),
    "topk_group": (_INT_OR_NULL, None),
    "norm_topk_prob": ((bool, type(None)), False),
}
_DEEPSEEK_V3: Mapping[str, tuple[_Types, Any]] = {
    **_LATENT,
    "vocab_size": (_INT, 129280),
    "hidden_size": (_INT, 7168),
    "intermediate_size": (_INT, 18432),
    "num_hidden_layers": (_INT, 61),
    "num_attention_heads": (_INT, 128),
    "max_position_embeddings": (_INT, 4096),
    "n_routed_experts": (_INT, 256),
    "num_experts_per_tok": (_INT_OR_NULL, 8),
    "n_shared_experts": (_INT, 1),
    "moe_intermediate_size": (_INT, 2048),
    "routed_scaling_factor": (_FLOAT, 2.5),
    "first_k_dense_replace": (_INT_OR_NULL, 3),
    "n_group": (_INT_OR_NULL, 8),
    "topk_group": (_INT_OR_NULL, 4),
    "norm_topk_prob": ((bool, type(None)), True),
    "rope_interleave": ((bool, type(None)), True),
}

#: Families by model_type.
FAMILIES: Mapping[str, Mapping[str, tuple[_Types, Any]]] = {
    "llama": {
        **_COMMON,
        "num_key_value_heads": (_INT_OR_NULL, None),
        "max_position_embeddings": (_INT, 2048),
        "attention_bias": (_BOOL, False),
        "mlp_bias": (_BOOL, False),
    },
    "mistral": {
        **_COMMON,
        "intermediate_size": (_INT, 14336),
        "num_key_value_heads": (_INT, 8),
        "max_position_embeddings": (_INT, 4096 * 32),
        "sliding_window": (_INT_OR_NULL, 4096),
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": (_INT, 128), "attention_bias": (_BOOL, False)},
    "mixtral": {
        **_COMMON,
        "intermediate_size": (_INT, 14336),
        "num_key_value_heads": (_INT_OR_NULL, 8),
        "max_position_embeddings": (_INT, 4096 * 32),
        "rms_norm_eps": (_FLOAT, 1e-5),
        "sliding_window": (_INT_OR_NULL, None),
        "rope_theta": ((int, float), 1e6),
        "num_local_experts": (_INT, 8),
        "num_experts_per_tok": (_INT, 2),
    },
    "qwen3_moe": {
        **_COMMON,
        "vocab_size": (_INT, 151936),
        "hidden_size": (_INT, 2048),
        "intermediate_size": (_INT, 6144),
        "num_hidden_layers": (_INT, 24),
        "num_key_value_heads": (_INT, 4),
        "use_sliding_window": (_BOOL, False),
        "sliding_window": (_INT_OR_NULL, 4096),
        "attention_bias": (_BOOL, False),
        "decoder_sparse_step": (_INT, 1),
        "moe_intermediate_size": (_INT, 768),
        "num_experts_per_tok": (_INT, 8),
        "num_experts": (_INT_OR_NULL, None),
        "num_local_experts": (_INT, 128),
        "norm_topk_prob": (_BOOL, False),
        "mlp_only_layers": ((list, type(None)), None),
    },
    "glm4_moe": {
        **_COMMON,
        "vocab_size": (_INT, 151552),
        "intermediate_size": (_INT, 10944),
        "num_hidden_layers": (_INT, 46),
        "num_attention_heads": (_INT, 96),
        "num_key_value_heads": (_INT, 8),
        "max_position_embeddings": (_INT, 131072),
        "rms_norm_eps": (_FLOAT, 1e-5),
        "attention_bias": (_BOOL, False),
        "partial_rotary_factor": (_FLOAT, 0.5),
        "moe_intermediate_size": (_INT, 1408),
        "num_experts_per_tok": (_INT, 8),
        "n_shared_experts": (_INT, 1),
        "n_routed_experts": (_INT, 128),
        "routed_scaling_factor": (_FLOAT, 1.0),
        "n_group": (_INT, 1),
        "topk_group": (_INT, 1),
        "first_k_dense_replace": (_INT, 1),
        "norm_topk_prob": (_BOOL, True),
        "use_qk_norm": (_BOOL, False),
    },
    "gemma": {
        **_GEMMA,
        "hidden_size": (_INT, 3072),
        "intermediate_size": (_INT, 24576),
        "num_hidden_layers": (_INT, 28),
        "num_attention_heads": (_INT, 16),
        "num_key_value_heads": (_INT, 16),
        "attention_bias": (_BOOL, False),
    },
    "gemma2": {
        **_GEMMA,
        **_LAYER_TYPES,
        "hidden_activation": (_TEXT, "gelu_pytorch_tanh"),
        "attention_bias": (_BOOL, False),
        "query_pre_attn_scalar": ((int, float), 256),
        "sliding_window": (_INT_OR_NULL, 4096),
        "final_logit_softcapping": (_NUMBER_OR_NULL, 30.0),
        "attn_logit_softcapping": (_NUMBER_OR_NULL, 50.0),
    },
    "gemma3_text": {
        **_GEMMA,
        **_LAYER_TYPES,
        "vocab_size": (_INT, 262208),
        "hidden_activation": (_TEXT, "gelu_pytorch_tanh"),
        "max_position_embeddings": (_INT, 131072),
        "attention_bias": (_BOOL, False),
        "query_pre_attn_scalar": ((int, float), 256),
        "sliding_window": (_INT_OR_NULL, 4096),
        "sliding_window_pattern": (_INT, 6),
        "rope_local_base_freq": ((int, float), 10000.0),
        "rope_theta": ((int, float), 1e6),
    },
    "gpt_oss": {
        **_COMMON,
        **_LAYER_TYPES,
        "vocab_size": (_INT, 201088),
        "hidden_size": (_INT, 2880),
        "intermediate_size": (_INT, 2880),
        "num_hidden_layers": (_INT, 36),
        "num_attention_heads": (_INT, 64),
        "num_key_value_heads": (_INT_OR_NULL, 8),
        "head_dim": (_INT_OR_NULL, 64),
        "max_position_embeddings": (_INT, 131072),
        "rms_norm_eps": (_FLOAT, 1e-5),
        "rope_theta": ((int, float), 150000.0),
        "attention_bias": (_BOOL, True),
        "sliding_window": (_INT_OR_NULL, 128),
        "num_local_experts": (_INT, 128),
        "num_experts_per_tok": (_INT, 4),
        "swiglu_alpha": ((int, float), CLAMPED_SILU_ALPHA),
        "swiglu_limit": ((int, float), CLAMPED_SILU_LIMIT),
    },
    "phi3": {
        **_COMMON,
        "vocab_size": (_INT, 32064),
        "hidden_size": (_INT, 3072),
        "intermediate_size": (_INT, 8192),
        "num_key_value_heads": (_INT_OR_NULL, None),
        "max_position_embeddings": (_INT, 4096),
        "rms_norm_eps": (_FLOAT, 1e-5),
        "sliding_window": (_INT_OR_NULL, None),
        "partial_rotary_factor": (_FLOAT, 1.0),
        "original_max_position_embeddings": (_INT, 4096),
    },
    "deepseek_v2": {
        **_LATENT,
        "vocab_size": (_INT, 102400),
        "max_position_embeddings": (_INT, 2048),
        "topk_method": ((str, type(None)), "greedy"),
        "mlp_bias": (_BOOL, False),
    },
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "olmo2": {
        **_COMMON,
        "vocab_size": (_INT, 50304),
        "num_key_value_heads": (_INT_OR_NULL, None),
        "max_position_embeddings": (_INT, 2048),
        "rms_norm_eps": (_FLOAT, 1e-5),
        "attention_bias": (_BOOL, False),
    },
}

_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}

#: Fields that count something there is of each model.
_SIZES = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    }
)

#: What each type of rotary embedding cannot do without, beside rope_theta.
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_FACTORS = ROPE_TYPES["longrope"]
#: The context that a model was first trained for.
ORIGINAL_LENGTH = "original_max_position_embeddings"
#: Of a gpt-oss whose config.json says nothing of it.
_GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_QK_NORMED = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2")
DTYPES = ("float32", "bfloat16", "float16")


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
        """Of types that have one."""
        return int(dict(self.parameters)[ORIGINAL_LENGTH])


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
    """What a family's layers are beyond those of FAMILIES' first four: by default as theirs."""

    activation: str = "silu"
    """Of gates: see baton_kernels.layer.Mlp."""
    norms: str = "before"
    """Where a layer's parts have their norms: before, after, or around them."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    has_wide_norms: bool = False
    """Whether norms are rounded after they are multiplied by their weights."""
    has_whole_qk_norm: bool = False
    """Whether queries, and keys, of all heads have one norm."""
    attention_scale: float = 1.0
    """Of scores."""
    attention_softcap: float | None = None
    """Of scores: see baton_kernels.paged_attention.ScoreTerms."""
    logit_softcap: float | None = None
    """c, where logits x become c * tanh(x / c)."""
    embedding_scale: float = 1.0
    rotary_dim: int | None = None
    """Of each head, the first so many dimensions are rotated; all if not given."""
    window_rope: RopeConfig | None = None
    """Of layers with a window, where they have another."""
    is_fused: bool = False
    """Whether the checkpoint has queries, keys and values in one tensor, and gate and up."""
    experts: ExpertsConfig | None = None
    num_unused_layers: int = 0
    """Layers that the checkpoint has after the last one, for other uses."""
    has_sinks: bool = False
    """Whether each head of attention has a sink: see baton_kernels.paged_attention.ScoreTerms."""
    latent: LatentConfig | None = None
    """Of multi-head latent attention; None for that over keys and values."""


_PLAIN = Traits()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of one of the families in FAMILIES. Windows are in tokens, None for full
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


#: Of any model; what is said of each layer is kept.
MAX_LAYERS = 10_000


def read_config(folder: Path) -> ModelConfig:
    """The config of the checkpoint in `folder`. Raises ModelError, UnsupportedModel."""
    return parse_config(_read(folder))


@dataclass(frozen=True, slots=True)
class Implementation:
    """Whose code runs a checkpoint's layers. name: "baton" or "transformers"; refusal: why not
    Baton's own, of a family that has some; else empty."""

    name: str
    refusal: str = ""


def choose_implementation(folder: Path, asked: str) -> Implementation:
    """Whose code runs the layers of the checkpoint in `folder`.

    asked: a name, or "auto", which takes Baton's own where the family is one of FAMILIES and has no
    setting that its layers do not know. Raises ModelError; UnsupportedModel, too, for what
    transformers' code is known not to be run with here, so that nobody waits for its import.
    """
    if asked == "baton":
        return Implementation(asked)
    raw = _read(folder)
    kind = str(raw.get("model_type", ""))
    refusal = ""
    if asked == "auto" and kind in FAMILIES:
        try:
            parse_config(raw)
            return Implementation("baton")
        except UnsupportedSetting as error:
            refusal = error.message
    if not kind:
        raise UnsupportedModel(
            f"model_type={kind!r}: Baton serves {', '.join(FAMILIES)}, and decoders that "
            "transformers knows; use a checkpoint of one of these"
        )
    try:
        parse_quantization(raw.get("quantization_config"))
    except UnsupportedModel as error:
        reason = f"model_type={kind!r} by transformers' code: {error.message}"
        if asked == "transformers" and _has_mxfp4(kind, raw):
            reason += ". Baton's own code reads it: leave out --model-impl=transformers"
        raise UnsupportedModel(". ".join(filter(None, (refusal, reason)))) from error
    return Implementation("transformers", refusal)


def read_quantization(folder: Path) -> QuantizationConfig | None:
    """How the checkpoint in `folder` is quantised, whatever its model. Raises ModelError,
    UnsupportedModel."""
    return parse_quantization(_read(folder).get("quantization_config"))


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: no config.json; give a folder or hub id of a transformers checkpoint"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object")
    return raw


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json holds as an object. Raises UnsupportedModel."""
    family = _family(raw)
    try:
        return _parsed(family, raw, _fields(family, raw))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Of fields that are looked into, or computed with, beyond their types.
        raise UnsupportedModel(
            f"config.json: what it says of a {family} model cannot be computed with ({error!r}); "
            "fetch it again"
        ) from error


def _parsed(family: str, raw: Mapping[str, Any], fields: dict[str, Any]) -> ModelConfig:
    heads = fields["num_attention_heads"]
    kv_heads = heads if fields["num_key_value_heads"] is None else fields["num_key_value_heads"]
    if family == "llama" and fields["hidden_size"] % heads:
        raise UnsupportedModel(
            f"hidden_size={fields['hidden_size']}: must be a multiple of "
            f"num_attention_heads={heads}"
        )
    # A qwen2 takes its own from hidden_size, unless config.json has one more field than the family.
    head_dim = fields["head_dim"] or fields["hidden_size"] // heads
    latent = _latent(family, raw, fields)
    if latent is not None:
        kv_heads, head_dim = 1, latent.rank + latent.rope_dim
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise UnsupportedModel(
            f"num_attention_heads={heads}, num_key_value_heads={kv_heads}, head_dim={head_dim}: "
            "the first must be a multiple of the second, and the third even"
        )
    traits = _traits(family, raw, fields, head_dim, latent)
    attention_bias = bool(fields.get("attention_bias"))
    config = ModelConfig(
        family=family,
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields["rms_norm_eps"],
        max_position_embeddings=fields["max_position_embeddings"],
        rope=_rope(raw, fields),
        windows=_windows(family, raw, fields),
        has_qkv_bias=attention_bias or family == "qwen2",
        has_output_bias=attention_bias and family != "glm4_moe",
        has_mlp_bias=bool(fields.get("mlp_bias")),
        has_qk_norm=family in _QK_NORMED or bool(fields.get("use_qk_norm")),
        is_tied=fields["tie_word_embeddings"],
        dtype=_dtype(raw),
        quantization=_quantization(family, raw),
        traits=traits,
    )
    parameters = dict(config.rope.parameters)
    for name in _FACTORS if config.rope.rope_type == "longrope" else ():
        if (found := len(parameters[name])) != (wanted := config.rotary_dim // 2):
            raise UnsupportedModel(f"{name} of rope has {found} numbers: this model has {wanted}")
    return config


def _traits(
    family: str,
    raw: Mapping[str, Any],
    fields: Mapping[str, Any],
    head_dim: int,
    latent: LatentConfig | None,
) -> Traits:
    traits = Traits(
        activation=_activation(family, fields),
        attention_scale=head_dim**-0.5,
        experts=_experts(family, fields),
        num_unused_layers=int(raw.get("num_nextn_predict_layers") or 0),
        is_fused=family == "phi3",
        rotary_dim=_rotary_dim(raw, fields, head_dim),
    )
    if family == "gpt_oss":
        settled = {"swiglu_alpha": CLAMPED_SILU_ALPHA, "swiglu_limit": CLAMPED_SILU_LIMIT}
        for name, known in settled.items():
            if fields[name] != known:
                raise UnsupportedSetting(f"{name}={fields[name]}: {known} is known")
        return replace(traits, activation="clamped_silu", has_wide_norms=True, has_sinks=True)
    if latent is not None:
        scale = (latent.plain_dim + latent.rope_dim) ** -0.5 * _score_scaling(_rope(raw, fields))
        return replace(traits, latent=latent, attention_scale=scale)
    if family == "olmo2":
        return replace(traits, norms="after", has_wide_norms=True, has_whole_qk_norm=True)
    if family.startswith("gemma"):
        if raw.get("use_bidirectional_attention"):
            raise UnsupportedModel("use_bidirectional_attention=true: only a causal model is known")
        traits = replace(
            traits,
            norm_offset=1.0,
            has_wide_norms=True,
            embedding_scale=fields["hidden_size"] ** 0.5,
        )
    if family == "gemma2":
        return replace(
            traits,
            norms="around",
            attention_scale=fields["query_pre_attn_scalar"] ** -0.5,
            attention_softcap=_softcap("attn_logit_softcapping", fields),
            logit_softcap=_softcap("final_logit_softcapping", fields),
        )
    if family == "gemma3_text":
        for name in ("final_logit_softcapping", "attn_logit_softcapping"):
            if raw.get(name) is not None:
                raise UnsupportedSetting(f"{name}={raw[name]}: known of no {family} model but null")
        return replace(
            traits,
            norms="around",
            attention_scale=fields["query_pre_attn_scalar"] ** -0.5,
            window_rope=_rope(raw, fields, "sliding_attention"),
        )
    return traits


def _latent(family: str, raw: Mapping[str, Any], fields: Mapping[str, Any]) -> LatentConfig | None:
    """Raises UnsupportedSetting."""
    if "kv_lora_rank" not in fields:
        return None
    _check_deepseek(family, raw, fields)
    return LatentConfig(
        rank=fields["kv_lora_rank"],
        query_rank=fields["q_lora_rank"],
        plain_dim=fields["qk_nope_head_dim"],
        rope_dim=fields["qk_rope_head_dim"],
        value_dim=fields["v_head_dim"],
        is_interleaved=bool(fields.get("rope_interleave", True)),
    )


def _check_deepseek(family: str, raw: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raise UnsupportedSetting for what is not known of DeepSeek's layers."""
    is_v2 = family == "deepseek_v2"
    known: dict[str, tuple[Any, ...]] = {
        "scoring_func": ("softmax" if is_v2 else "sigmoid",),
        "topk_method": ("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",),
        "moe_layer_freq": (1,),
        "mlp_bias": (False,),
        "norm_topk_prob": (False, None) if is_v2 else (True, False),
    }
    for name, values in known.items():
        value = raw.get(name, fields.get(name, values[0]))
        if value not in values:
            texts = " or ".join(json.dumps(each) for each in values)
            raise UnsupportedSetting(f"{name}={json.dumps(value)}: {texts} is known of {family}")
    if fields["qk_rope_head_dim"] % 2:
        raise UnsupportedSetting(f"qk_rope_head_dim={fields['qk_rope_head_dim']}: must be even")


def _score_scaling(rope: RopeConfig) -> float:
    """What DeepSeek multiplies scores by where RoPE stretches the context, beside what cos and sin
    are multiplied by."""
    weight = dict(rope.parameters).get("mscale_all_dim") or 0
    if rope.rope_type == "default" or not weight or rope.factor <= 1:
        return 1.0
    return (0.1 * float(weight) * math.log(rope.factor) + 1.0) ** 2


def _softcap(name: str, fields: Mapping[str, Any]) -> float | None:
    value: float | None = fields[name]
    if value is not None and not value > 0:
        raise UnsupportedModel(f"{name}={value}: must be positive or null")
    return value


def _activation(family: str, fields: Mapping[str, Any]) -> str:
    name = fields.get("hidden_activation", fields["hidden_act"])
    if family == "gemma" and name == "gelu":  # means this one: transformers reads it so
        name = "gelu_pytorch_tanh"
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in known:
        raise UnsupportedSetting(f"hidden_act={name!r}: {' and '.join(map(repr, known))} are known")
    return known[name]


def _experts(family: str, fields: Mapping[str, Any]) -> ExpertsConfig | None:
    num_layers, layers = fields["num_hidden_layers"], range(fields["num_hidden_layers"])
    if family == "mixtral":
        found = ExpertsConfig(
            (True,) * num_layers,
            fields["num_local_experts"],
            fields["num_experts_per_tok"],
            fields["intermediate_size"],
        )
    elif family == "gpt_oss":
        # A softmax over the chosen ones alone is that over all, normalised.
        found = ExpertsConfig(
            (True,) * num_layers,
            fields["num_local_experts"],
            fields["num_experts_per_tok"],
            fields["intermediate_size"],
            is_stacked=True,
        )
    elif family == "qwen3_moe":
        step, dense = fields["decoder_sparse_step"], set(fields["mlp_only_layers"] or ())
        found = ExpertsConfig(
            tuple(i not in dense and (i + 1) % step == 0 for i in layers),
            fields["num_experts"] or fields["num_local_experts"],
            fields["num_experts_per_tok"],
            fields["moe_intermediate_size"],
            is_normalised=fields["norm_topk_prob"],
        )
    elif "n_routed_experts" in fields:
        is_v2 = family == "deepseek_v2"
        has_groups = not is_v2 or fields["topk_method"] == "group_limited_greedy"
        found = ExpertsConfig(
            tuple(i >= (fields["first_k_dense_replace"] or 0) for i in layers),
            fields["n_routed_experts"],
            fields["num_experts_per_tok"],
            fields["moe_intermediate_size"],
            is_sigmoid=not is_v2,
            is_normalised=bool(fields["norm_topk_prob"]) and not is_v2,
            scale=fields["routed_scaling_factor"],
            num_groups=(has_groups and fields["n_group"]) or 1,
            num_chosen_groups=(has_groups and fields["topk_group"]) or 1,
            group_top=1 if is_v2 else 2,
            shared_size=fields["moe_intermediate_size"] * fields["n_shared_experts"],
        )
    else:
        return None
    if not 1 <= found.num_chosen <= found.num_experts or found.num_experts % found.num_groups:
        raise UnsupportedModel(
            f"{found.num_chosen} of {found.num_experts} experts in {found.num_groups} groups: "
            "the first must be 1 to the second, and that a multiple of the third"
        )
    group_size = found.num_experts // found.num_groups
    if not found.num_chosen <= found.num_chosen_groups * group_size <= found.num_experts:
        raise UnsupportedModel(
            f"{found.num_chosen} experts of {found.num_chosen_groups} of {found.num_groups} groups "
            f"of {group_size}: there must be so many"
        )
    return found


def _rotary_dim(raw: Mapping[str, Any], fields: Mapping[str, Any], head_dim: int) -> int | None:
    """See Traits. Only families with a field partial_rotary_factor have one."""
    if "partial_rotary_factor" not in fields:
        return None
    parameters = raw.get("rope_scaling") or fields["rope_parameters"] or {}
    share = parameters.get("partial_rotary_factor", fields["partial_rotary_factor"])
    dim = int(head_dim * share)
    if not 2 <= dim <= head_dim or dim % 2:
        raise UnsupportedModel(
            f"partial_rotary_factor={share}: of head_dim={head_dim} an even number of dimensions "
            "must be rotated"
        )
    return None if dim == head_dim else dim


def _family(raw: Mapping[str, Any]) -> str:
    family = str(raw.get("model_type", ""))
    known = ", ".join(FAMILIES)
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"model_type={family!r}: Baton's own code runs {known}; "
            "use a checkpoint of one of these"
        )
    expected = _ARCHITECTURES[family]
    architectures = raw.get("architectures") or [expected]
    if not isinstance(architectures, list) or expected not in architectures:
        raise UnsupportedModel(
            f"architectures={architectures}: Baton generates text; use a checkpoint of {expected}"
        )
    return family


def _fields(family: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of the family's fields, and the family's defaults."""
    fields: dict[str, Any] = {}
    for name, (types, default) in FAMILIES[family].items():
        value = fields[name] = raw.get(name, default)
        if type(value) not in types:
            wanted = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise UnsupportedModel(f"{name}={value!r}: a {family} model has {wanted} there")
        if name in _SIZES and value is not None and value < 1:
            raise UnsupportedModel(f"{name}={value}: must be positive")
    if fields["num_hidden_layers"] > MAX_LAYERS:
        raise UnsupportedModel(
            f"num_hidden_layers={fields['num_hidden_layers']}: at most {MAX_LAYERS} are known"
        )
    return fields


def _rope(
    raw: Mapping[str, Any], fields: Mapping[str, Any], layer_type: str = "full_attention"
) -> RopeConfig:
    """Of layers of this type. Old files have rope_scaling, which goes before rope_parameters, with
    `type`, and rope_theta beside it."""
    parameters = _rope_parameters(raw, fields, layer_type)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedSetting("rope_parameters differ by layer type: not known to Baton")
    rope_type = str(parameters.setdefault("rope_type", parameters.get("type", "default")))
    if raw.get("model_type") == "phi3" and rope_type in ("su", "yarn"):  # as it was called once
        rope_type = parameters["rope_type"] = "longrope"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedSetting(
            f"rope_type={rope_type!r}: Baton knows {', '.join(ROPE_TYPES)}; use another checkpoint"
        )
    if "partial_rotary_factor" in fields:
        parameters.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
        known = ("default", "linear", "longrope")
        if parameters["partial_rotary_factor"] != 1.0 and rope_type not in known:
            raise UnsupportedSetting(
                f"partial_rotary_factor={parameters['partial_rotary_factor']} with "
                f"rope_type={rope_type!r}: known with {', '.join(known)}"
            )
    elif parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedSetting("partial_rotary_factor other than 1 is not known to Baton")
    if rope_type in ("llama3", "yarn", "longrope"):
        parameters.setdefault(ORIGINAL_LENGTH, fields["max_position_embeddings"])
        of_model = fields.get(ORIGINAL_LENGTH) or raw.get(ORIGINAL_LENGTH)
        parameters[ORIGINAL_LENGTH] = of_model or parameters[ORIGINAL_LENGTH]
    if rope_type == "longrope":
        _check_longrope(parameters)
    for name in ("rope_theta", *ROPE_TYPES[rope_type]):
        if name not in parameters:
            raise UnsupportedModel(f"rope_type={rope_type!r} without {name}: add it to config.json")
        # A yarn model may have null for its factor: it is a ratio of lengths then.
        is_ratio = rope_type == "yarn" and name == "factor" and parameters[name] is None
        if name in _FACTORS:
            _check_factors(name, parameters[name])
        elif not is_ratio and type(parameters[name]) not in (int, float):
            raise UnsupportedModel(f"{name}={parameters[name]!r} of rope: must be a number")
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in parameters.items()}
    return RopeConfig(rope_type, float(parameters["rope_theta"]), tuple(sorted(plain.items())))


def _check_longrope(parameters: Mapping[str, Any]) -> None:
    """What its scaling is computed of."""
    original = parameters[ORIGINAL_LENGTH]
    if type(original) is not int or original < 2:
        raise UnsupportedModel(f"{ORIGINAL_LENGTH}={original!r}: must be a number of tokens, 2 up")
    for name in ("factor", "attention_factor"):
        if type(value := parameters.get(name)) not in (int, float, type(None)):
            raise UnsupportedModel(f"{name}={value!r} of rope: must be a number")


def _check_factors(name: str, factors: object) -> None:
    """How many there must be is known with the model's heads."""
    if (
        not isinstance(factors, list)
        or not factors
        or not all(type(each) in (int, float) and each > 0 for each in factors)
    ):
        raise UnsupportedModel(f"{name} of rope: must be a list of positive numbers")


def _rope_parameters(
    raw: Mapping[str, Any], fields: Mapping[str, Any], layer_type: str
) -> dict[str, Any]:
    found = raw.get("rope_scaling") or fields["rope_parameters"] or {}
    if not found and "swiglu_alpha" in fields:
        found = dict(_GPT_OSS_ROPE)
    if not isinstance(found, dict):
        raise UnsupportedModel(f"rope_scaling={found!r}: must be an object")
    theta = raw.get("rope_theta", fields.get("rope_theta", 10000.0))
    if "rope_local_base_freq" not in fields:
        return {"rope_theta": theta, **found}
    # Two kinds of layers, each with its own.
    of_type = (fields["rope_parameters"] or {}).get(layer_type) or {}
    if layer_type == "sliding_attention":
        return {"rope_theta": fields["rope_local_base_freq"], **of_type}
    return {"rope_theta": theta, **of_type, **(raw.get("rope_scaling") or {})}


def _windows(
    family: str, raw: Mapping[str, Any], fields: Mapping[str, Any]
) -> tuple[int | None, ...]:
    num_layers: int = fields["num_hidden_layers"]
    window: int | None = (
        fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    )
    if window is not None and window < 1:
        raise UnsupportedModel(f"sliding_window={window}: must be positive or null")
    layer_types = raw.get("layer_types")
    if layer_types is None and "sliding_window_pattern" in fields:
        pattern = fields["sliding_window_pattern"]
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    if layer_types is None and family in ("gemma2", "gpt_oss"):
        return tuple(None if layer % 2 else window for layer in range(num_layers))
    if layer_types is None:
        first = fields.get("max_window_layers", 0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list):
        raise UnsupportedModel(f"layer_types={layer_types!r}: must be a list")
    unknown = sorted({str(kind) for kind in layer_types} - set(known))
    if unknown or len(layer_types) != num_layers:
        raise UnsupportedModel(
            f"layer_types with {unknown or len(layer_types)}: "
            f"one of {list(known)} per layer is known"
        )
    if family in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        # all of their layers are alike, whatever the list says
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _quantization(family: str, raw: Mapping[str, Any]) -> QuantizationConfig | None:
    """Weights in mxfp4 are dequantised as they are read: none is left."""
    return None if _has_mxfp4(family, raw) else parse_quantization(raw.get("quantization_config"))


def _has_mxfp4(family: str, raw: Mapping[str, Any]) -> bool:
    """Which a gpt-oss has in its experts."""
    found = raw.get("quantization_config")
    is_mxfp4 = isinstance(found, Mapping) and found.get("quant_method") == "mxfp4"
    return is_mxfp4 and family == "gpt_oss"


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype={name}: one of {', '.join(DTYPES)} is known")
    return name
