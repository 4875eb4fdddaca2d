"""What a checkpoint's config.json says about a decoder, in the terms that Baton's forward uses.

The file is read as transformers reads it: the same defaults, the same precedence of old and new
spellings, the same types refused. tests/model/test_config_same_as_transformers.py compares the two;
importing transformers here would take longer than all the rest of a worker's start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.errors import ModelError, UnsupportedModel
from baton.quantization.config import QuantizationConfig, parse_quantization

#: Types that a value may have. As in transformers, a whole number is no float, and a bool no
#: number.
_Types = tuple[type, ...]

_INT, _FLOAT, _BOOL, _TEXT = (int,), (float,), (bool,), (str,)
_INT_OR_NULL: _Types = (int, type(None))

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
}

_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

#: What each type of rotary embedding cannot do without, beside rope_theta.
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
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
    """A decoder of one of the families in FAMILIES. Windows are in tokens, None for full
    attention."""

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
    fields = _fields(family, raw)
    heads = fields["num_attention_heads"]
    if heads < 1:
        raise UnsupportedModel(f"num_attention_heads={heads}: must be positive")
    kv_heads = heads if fields["num_key_value_heads"] is None else fields["num_key_value_heads"]
    if family == "llama" and fields["hidden_size"] % heads:
        raise UnsupportedModel(
            f"hidden_size={fields['hidden_size']}: must be a multiple of "
            f"num_attention_heads={heads}"
        )
    # A qwen2 takes its own from hidden_size, unless config.json has one more field than the family.
    head_dim = fields["head_dim"] or fields["hidden_size"] // heads
    if kv_heads < 1 or heads % kv_heads or head_dim % 2:
        raise UnsupportedModel(
            f"num_attention_heads={heads}, num_key_value_heads={kv_heads}, head_dim={head_dim}: "
            "the first must be a multiple of the second, and the third even"
        )
    if fields["hidden_act"] != "silu":
        raise UnsupportedModel(f"hidden_act={fields['hidden_act']!r}: only 'silu' is known")
    attention_bias = bool(fields.get("attention_bias"))
    return ModelConfig(
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
        has_output_bias=attention_bias,
        has_mlp_bias=bool(fields.get("mlp_bias")),
        has_qk_norm=family == "qwen3",
        is_tied=fields["tie_word_embeddings"],
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
    expected = _ARCHITECTURES[family]
    architectures = raw.get("architectures") or [expected]
    if expected not in architectures:
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
            told = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise UnsupportedModel(f"{name}={value!r}: a {family} model has {told} there")
    return fields


def _rope(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> RopeConfig:
    """Old files have rope_scaling, which goes before rope_parameters, with `type`, and rope_theta
    beside it."""
    told = raw.get("rope_scaling") or fields["rope_parameters"] or {}
    if not isinstance(told, dict):
        raise UnsupportedModel(f"rope_scaling={told!r}: must be an object")
    parameters = {"rope_theta": raw.get("rope_theta", 10000.0), **told}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModel("rope_parameters differ by layer type: not known to Baton")
    rope_type = str(parameters.setdefault("rope_type", parameters.get("type", "default")))
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModel(
            f"rope_type={rope_type!r}: Baton knows {', '.join(ROPE_TYPES)}; use another checkpoint"
        )
    partial = raw.get("partial_rotary_factor")
    if partial is not None:
        parameters.setdefault("partial_rotary_factor", partial)
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not known to Baton")
    if rope_type in ("llama3", "yarn"):
        original = "original_max_position_embeddings"
        parameters.setdefault(original, fields["max_position_embeddings"])
        parameters[original] = raw.get(original) or parameters[original]
    for name in ("rope_theta", *ROPE_TYPES[rope_type]):
        if name not in parameters:
            raise UnsupportedModel(f"rope_type={rope_type!r} without {name}: add it to config.json")
        # A yarn model may have null for its factor: it is a ratio of lengths then.
        is_ratio = rope_type == "yarn" and name == "factor" and parameters[name] is None
        if not is_ratio and type(parameters[name]) not in (int, float):
            raise UnsupportedModel(f"{name}={parameters[name]!r} of rope: must be a number")
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in parameters.items()}
    return RopeConfig(rope_type, float(parameters["rope_theta"]), tuple(sorted(plain.items())))


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
    if family == "mistral":  # all of its layers are alike, whatever the list says
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype={name}: one of {', '.join(DTYPES)} is known")
    return name
