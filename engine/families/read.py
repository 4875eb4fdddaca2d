"""Reads config.json into a ModelConfig, and chooses the code that runs the layers.

Defaults, precedence of old and new spellings, and refused types are those of transformers, which
tests/engine/families/test_config_same_as_transformers.py holds them to. It does not import
transformers, because that takes longer than the rest of a worker's start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ModelError, UnsupportedModel, UnsupportedSetting
from engine.families.config import DTYPES, LatentConfig, ModelConfig, Traits
from engine.families.experts import check_experts
from engine.families.family import Family
from engine.families.fields import Settings, read_fields
from engine.families.overrides import NO_OVERRIDES, ROPE_FIELDS, ConfigOverrides
from engine.families.registry import FAMILIES
from engine.families.rope import check_num_factors, rotary_dim
from engine.quantization.config import QuantizationConfig, parse_quantization


def read_config(folder: Path, overrides: ConfigOverrides = NO_OVERRIDES) -> ModelConfig:
    """The config of the checkpoint in `folder`. Raises ModelError, UnsupportedModel."""
    return _overridden(read_raw(folder), overrides)


def _overridden(raw: Mapping[str, Any], overrides: ConfigOverrides) -> ModelConfig:
    """Raises UnsupportedModel."""
    with overrides.named():
        family = FAMILIES.get(str(raw.get("model_type")))
        known = ROPE_FIELDS | family.fields.keys() if family else ROPE_FIELDS
        return parse_config(overrides.applied(raw, known))


@dataclass(frozen=True, slots=True)
class Implementation:
    """The code that runs a checkpoint's layers. name: "baton" or "transformers". refusal: why
    Baton's code cannot run a family that it otherwise supports; else empty."""

    name: str
    refusal: str = ""


def choose_implementation(
    folder: Path, asked: str, overrides: ConfigOverrides = NO_OVERRIDES
) -> Implementation:
    """Choose the code that runs the layers of the checkpoint in `folder`.

    asked: a name, or "auto", which prefers Baton's code where it supports family and settings.
    Raises ModelError, or UnsupportedModel for a model that transformers' code is known not to run
    here, before the slow import.
    """
    if asked == "baton":
        return Implementation(asked)
    raw = read_raw(folder)
    kind = str(raw.get("model_type", ""))
    refusal = ""
    if asked == "auto" and kind in FAMILIES:
        try:
            _overridden(raw, overrides)
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
        if asked == "transformers" and kind in FAMILIES and _own_quantization(FAMILIES[kind], raw):
            reason += ". Baton's own code reads it: leave out --model-impl=transformers"
        raise UnsupportedModel(". ".join(filter(None, (refusal, reason)))) from error
    return Implementation("transformers", refusal)


def read_quantization(folder: Path) -> QuantizationConfig | None:
    """Quantisation of the checkpoint in `folder`, of any model. Raises ModelError,
    UnsupportedModel."""
    return parse_quantization(read_raw(folder).get("quantization_config"))


def read_raw(folder: Path) -> dict[str, Any]:
    """config.json of the checkpoint in `folder`. Raises ModelError."""
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
    """Parse config.json, given as an object. Raises UnsupportedModel."""
    family = _family(raw)
    settings = read_fields(family.name, family.fields, raw)
    try:
        return _parsed(family, settings)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Fields that are indexed or computed with, beyond the check of their types.
        raise UnsupportedModel(
            f"config.json: what it says of a {family.name} model cannot be computed with "
            f"({error!r}); fetch it again"
        ) from error


def _family(raw: Mapping[str, Any]) -> Family:
    name = str(raw.get("model_type", ""))
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"model_type={name!r}: Baton's own code runs {', '.join(FAMILIES)}; "
            "use a checkpoint of one of these"
        )
    expected = FAMILIES[name].architecture
    architectures = raw.get("architectures") or [expected]
    if not isinstance(architectures, list) or expected not in architectures:
        raise UnsupportedModel(
            f"architectures={architectures}: Baton generates text; use a checkpoint of {expected}"
        )
    return FAMILIES[name]


def _parsed(family: Family, settings: Settings) -> ModelConfig:
    family.check(settings)
    heads = settings["num_attention_heads"]
    kv_heads = heads if settings["num_key_value_heads"] is None else settings["num_key_value_heads"]
    # config.json may have head_dim even if the family does not define it.
    head_dim = settings["head_dim"] or settings["hidden_size"] // heads
    latent = family.latent(settings)
    if latent is not None:
        kv_heads, head_dim = 1, latent.rank + latent.rope_dim
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise UnsupportedModel(
            f"num_attention_heads={heads}, num_key_value_heads={kv_heads}, head_dim={head_dim}: "
            "the first must be a multiple of the second, and the third even"
        )
    traits = _traits(family, settings, head_dim, latent)
    attention_bias = bool(settings.fields.get("attention_bias"))
    config = ModelConfig(
        family=family.name,
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=settings["rms_norm_eps"],
        max_position_embeddings=settings["max_position_embeddings"],
        rope=family.rope(settings),
        windows=family.windows(settings),
        has_qkv_bias=attention_bias or family.has_qkv_bias,
        has_output_bias=attention_bias and family.has_output_bias,
        has_mlp_bias=bool(settings.fields.get("mlp_bias")),
        has_qk_norm=family.has_qk_norm or bool(settings.fields.get("use_qk_norm")),
        is_tied=settings["tie_word_embeddings"],
        dtype=_dtype(settings.raw),
        quantization=_quantization(family, settings.raw),
        traits=traits,
    )
    check_num_factors(config.rope, config.rotary_dim)
    return config


def _traits(
    family: Family, settings: Settings, head_dim: int, latent: LatentConfig | None
) -> Traits:
    activation, experts = family.activation(settings), family.experts(settings)
    if experts is not None:
        check_experts(experts)
    plain = Traits(
        activation=activation,
        attention_scale=head_dim**-0.5,
        experts=experts,
        latent=latent,
        num_unused_layers=int(settings.raw.get("num_nextn_predict_layers") or 0),
        rotary_dim=rotary_dim(settings, head_dim),
    )
    return family.traits(settings, plain)


def _quantization(family: Family, raw: Mapping[str, Any]) -> QuantizationConfig | None:
    return _own_quantization(family, raw) or parse_quantization(raw.get("quantization_config"))


def _own_quantization(family: Family, raw: Mapping[str, Any]) -> QuantizationConfig | None:
    """See Family.quantizations."""
    found = raw.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    return family.quantizations.get(str(method))


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype={name}: one of {', '.join(DTYPES)} is known")
    return name
