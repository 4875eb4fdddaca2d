"""What a checkpoint's config.json says about a decoder, in the terms that Baton's forward uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.errors import ModelError, UnsupportedModel
from baton.quantization.config import QuantizationConfig, parse_quantization

#: Families by model_type: the config class of transformers, which knows the defaults of each.
FAMILIES: Mapping[str, str] = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of one of the families in FAMILIES. Windows are in tokens, None for full attention."""

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

    @property
    def derived_max_len(self) -> int:
        """The longest context that the model was made for, in tokens."""
        longest = self.max_position_embeddings
        if self.rope.rope_type in ("linear", "dynamic"):
            return int(longest * self.rope.factor)
        if self.rope.rope_type == "yarn":
            original = dict(self.rope.parameters).get("original_max_position_embeddings")
            return max(longest, int((original or longest) * self.rope.factor))
        return longest

    @property
    def kv_digest(self) -> str:
        """A digest of every setting on which the meaning of KV depends, but the weights."""
        return hashlib.blake2b(repr(replace(self, dtype="")).encode(), digest_size=8).hexdigest()


def read_config(folder: Path) -> ModelConfig:
    """The config of the checkpoint in `folder`. Raises ModelError, UnsupportedModel."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: no config.json; give a folder or hub id of a transformers checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object")
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json holds as an object. Raises UnsupportedModel."""
    family = _family(raw)
    config = _transformers_config(family, raw)
    _refuse_unknown_settings(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedModel(
            f"num_attention_heads={heads}, num_key_value_heads={kv_heads}, head_dim={head_dim}: "
            "the first must be a multiple of the second, and the third even"
        )
    attention_bias = bool(getattr(config, "attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope=_rope(config),
        windows=_windows(family, config),
        has_qkv_bias=attention_bias or family == "qwen2",
        has_output_bias=attention_bias,
        has_mlp_bias=bool(getattr(config, "mlp_bias", False)),
        has_qk_norm=family == "qwen3",
        is_tied=bool(config.tie_word_embeddings),
        dtype=_dtype(raw),
        quantization=parse_quantization(raw.get("quantization_config")),
    )


def _family(raw: Mapping[str, Any]) -> str:
    family = str(raw.get("model_type", ""))
    known = ", ".join(FAMILIES)
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"model_type={family!r}: Baton serves {known}; use a checkpoint of one of these"
        )
    expected = FAMILIES[family].removesuffix("Config") + "ForCausalLM"
    architectures = raw.get("architectures") or [expected]
    if expected not in architectures:
        raise UnsupportedModel(
            f"architectures={architectures}: Baton generates text; use a checkpoint of {expected}"
        )
    return family


def _transformers_config(family: str, raw: Mapping[str, Any]) -> Any:
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        return getattr(transformers, FAMILIES[family]).from_dict(dict(raw))
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise UnsupportedModel(
            f"config.json is no {FAMILIES[family]} that transformers {transformers.__version__} accepts: {error}"
        ) from error


def _refuse_unknown_settings(config: Any) -> None:
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"hidden_act={config.hidden_act!r}: only 'silu' is known")


def _rope(config: Any) -> RopeConfig:
    parameters = dict(config.rope_parameters or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModel("rope_parameters differ by layer type: not known to Baton")
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModel(
            f"rope_type={rope_type!r}: Baton knows {', '.join(ROPE_TYPES)}; use another checkpoint"
        )
    if float(parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not known to Baton")
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in parameters.items()}
    return RopeConfig(rope_type, float(parameters["rope_theta"]), tuple(sorted(plain.items())))


def _windows(family: str, config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None) if family != "llama" else None
    if window is not None and window < 1:
        raise UnsupportedModel(f"sliding_window={window}: must be positive or null")
    layer_types = getattr(config, "layer_types", None)
    if family == "mistral" or layer_types is None:
        return (window,) * int(config.num_hidden_layers)
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(layer_types) - set(known))
    if unknown or len(layer_types) != config.num_hidden_layers:
        raise UnsupportedModel(
            f"layer_types with {unknown or len(layer_types)}: one of {list(known)} per layer is known"
        )
    return tuple(known[kind] for kind in layer_types)


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype={name}: one of {', '.join(DTYPES)} is known")
    return name
