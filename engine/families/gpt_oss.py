"""gpt-oss: attention sinks, a window in every other layer, and experts with biases, stored in one
tensor per layer, in mxfp4 or not."""

from dataclasses import replace

from baton.errors import UnsupportedSetting
from engine.families import windows
from engine.families.config import ExpertNames, ExpertsConfig, RopeConfig, Traits
from engine.families.experts import in_all_layers
from engine.families.family import Family
from engine.families.fields import COMMON, Settings, bools, floats, ints, ints_or_null, numbers
from engine.families.rope import make_rope_config, rope_parameters
from engine.quantization.config import MXFP4

#: As in baton_kernels.gated_activation.clamped_swiglu, which would import torch.
CLAMPED_SILU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
#: Default if config.json has none.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _rope(settings: Settings) -> RopeConfig:
    return make_rope_config(settings, rope_parameters(settings, _ROPE))


def _experts(settings: Settings) -> ExpertsConfig:
    """A softmax over the chosen experts equals a normalised softmax over all."""
    names = ExpertNames(router="mlp.router")
    return replace(in_all_layers(settings), is_stacked=True, names=names)


def _traits(settings: Settings, traits: Traits) -> Traits:
    for name, known in CLAMPED_SILU.items():
        if settings[name] != known:
            raise UnsupportedSetting(f"{name}={settings[name]}: {known} is known")
    return replace(traits, activation="clamped_silu", has_wide_norms=True, has_sinks=True)


FIELDS = {
    **COMMON,
    **windows.FIELDS,
    **ints(vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36),
    **ints(num_attention_heads=64, max_position_embeddings=131072),
    **ints(num_local_experts=128, num_experts_per_tok=4),
    **ints_or_null(num_key_value_heads=8, head_dim=64, sliding_window=128),
    **floats(rms_norm_eps=1e-5),
    **numbers(rope_theta=150000.0, **CLAMPED_SILU),
    **bools(attention_bias=True),
}
FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    FIELDS,
    rope=_rope,
    windows=windows.alternate,
    experts=_experts,
    traits=_traits,
    quantizations={"mxfp4": MXFP4},
)
