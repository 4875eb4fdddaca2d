"""Gemma 3 (text): windowed layers between full ones, each kind with its own rotary embedding."""

from dataclasses import replace
from functools import partial
from typing import Any

from baton.errors import UnsupportedSetting
from engine.families import gemma2
from engine.families.config import RopeConfig, Traits
from engine.families.family import Family, read_activation
from engine.families.fields import Settings, ints, numbers
from engine.families.rope import make_rope_config, rope_parameters, rope_theta
from engine.families.windows import read_windows


def _rope(settings: Settings) -> RopeConfig:
    """Rotary embedding of full layers; rope_scaling applies to these only."""
    scaling = settings.raw.get("rope_scaling") or {}
    parameters = {**_parameters(settings, "full_attention", rope_theta(settings)), **scaling}
    return make_rope_config(settings, parameters)


def _parameters(settings: Settings, layer_type: str, theta: Any) -> dict[str, Any]:
    rope_parameters(settings)  # raises unless rope_scaling is an object
    of_type = (settings["rope_parameters"] or {}).get(layer_type) or {}
    return {"rope_theta": theta, **of_type}


def _windows(settings: Settings) -> tuple[int | None, ...]:
    pattern = settings["sliding_window_pattern"]
    return read_windows(settings, lambda layer: (layer + 1) % pattern != 0)


def _traits(settings: Settings, traits: Traits) -> Traits:
    traits = gemma2.read_traits(settings, traits)
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if (cap := settings.raw.get(name)) is not None:
            raise UnsupportedSetting(f"{name}={cap}: known of no {settings.family} model but null")
    local = _parameters(settings, "sliding_attention", settings["rope_local_base_freq"])
    return replace(traits, window_rope=make_rope_config(settings, local))


FIELDS = {
    **gemma2.FIELDS,
    **ints(vocab_size=262208, max_position_embeddings=131072, sliding_window_pattern=6),
    **numbers(rope_local_base_freq=10000.0, rope_theta=1e6),
}
FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    FIELDS,
    rope=_rope,
    windows=_windows,
    activation=partial(read_activation, field="hidden_activation"),
    traits=_traits,
    has_qk_norm=True,
)
