"""Parts that all DeepSeek models share: latent attention, and experts after dense layers."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton.errors import UnsupportedSetting
from engine.families.config import LatentConfig, Traits
from engine.families.fields import (
    COMMON,
    Settings,
    bools,
    bools_or_null,
    floats,
    ints,
    ints_or_null,
)
from engine.families.rope import read_rope

FIELDS = {
    **COMMON,
    **ints(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    **ints(n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1407),
    **ints_or_null(num_key_value_heads=None, q_lora_rank=1536, num_experts_per_tok=None),
    **ints_or_null(first_k_dense_replace=0, n_group=None, topk_group=None),
    **floats(routed_scaling_factor=1.0),
    **bools(attention_bias=False),
    **bools_or_null(norm_topk_prob=False),
}


def check_known(settings: Settings, known: Mapping[str, tuple[Any, ...]]) -> None:
    """Check settings that Baton supports for few values.

    known: supported values by setting; the first one is the default of a setting that is not in
    FIELDS. Raises UnsupportedSetting.
    """
    for name, values in {**known, "moe_layer_freq": (1,), "mlp_bias": (False,)}.items():
        value = settings.raw.get(name, settings.fields.get(name, values[0]))
        if value not in values:
            texts = " or ".join(json.dumps(each) for each in values)
            raise UnsupportedSetting(
                f"{name}={json.dumps(value)}: {texts} is known of {settings.family}"
            )
    if settings["qk_rope_head_dim"] % 2:
        raise UnsupportedSetting(f"qk_rope_head_dim={settings['qk_rope_head_dim']}: must be even")


def read_latent(settings: Settings) -> LatentConfig:
    return LatentConfig(
        rank=settings["kv_lora_rank"],
        query_rank=settings["q_lora_rank"],
        plain_dim=settings["qk_nope_head_dim"],
        rope_dim=settings["qk_rope_head_dim"],
        value_dim=settings["v_head_dim"],
        is_interleaved=bool(settings.fields.get("rope_interleave", True)),
    )


def read_traits(settings: Settings, traits: Traits) -> Traits:
    head_dim = settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
    return replace(traits, attention_scale=head_dim**-0.5 * _score_scaling(settings))


def _score_scaling(settings: Settings) -> float:
    """Factor of attention scores for a stretched context, in addition to that of cos and sin."""
    rope = read_rope(settings)
    weight = dict(rope.parameters).get("mscale_all_dim") or 0
    if rope.rope_type == "default" or not weight or rope.factor <= 1:
        return 1.0
    if rope.rope_type == "dynamic_yarn":
        raise UnsupportedSetting(
            "rope_type='dynamic_yarn' with mscale_all_dim: the scale of attention would depend on "
            "the length, which is not known here; give yarn, or leave mscale_all_dim out"
        )
    return (0.1 * float(weight) * math.log(rope.factor) + 1.0) ** 2
