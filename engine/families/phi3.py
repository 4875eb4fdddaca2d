"""Phi-3 and Phi-4-mini: partial rotation, longrope, and fused tensors in the checkpoint."""

from dataclasses import replace

from engine.families import windows
from engine.families.config import RopeConfig
from engine.families.family import Family
from engine.families.fields import COMMON, Settings, floats, ints, ints_or_null
from engine.families.rope import make_rope_config, rope_parameters


def _rope(settings: Settings) -> RopeConfig:
    parameters = rope_parameters(settings)
    if parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):  # older names
        parameters["rope_type"] = "longrope"
    return make_rope_config(settings, parameters)


FIELDS = {
    **COMMON,
    **ints(vocab_size=32064, hidden_size=3072, intermediate_size=8192),
    **ints(max_position_embeddings=4096, original_max_position_embeddings=4096),
    **ints_or_null(num_key_value_heads=None, sliding_window=None),
    **floats(rms_norm_eps=1e-5, partial_rotary_factor=1.0),
}
FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    FIELDS,
    rope=_rope,
    windows=windows.alike,
    traits=lambda _, traits: replace(traits, is_fused=True),
)
