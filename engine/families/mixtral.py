"""Mixtral: experts in all layers, by softmax."""

from dataclasses import replace

from engine.families import windows
from engine.families.config import ExpertNames, ExpertsConfig, MlpNames
from engine.families.experts import in_all_layers
from engine.families.family import Family
from engine.families.fields import COMMON, Settings, floats, ints, ints_or_null, numbers

_NAMES = ExpertNames(
    "block_sparse_moe.gate", "block_sparse_moe.experts", MlpNames("w1", "w3", "w2")
)


def _experts(settings: Settings) -> ExpertsConfig:
    return replace(in_all_layers(settings), names=_NAMES)


FIELDS = {
    **COMMON,
    **ints(intermediate_size=14336, max_position_embeddings=131072),
    **ints(num_local_experts=8, num_experts_per_tok=2),
    **ints_or_null(num_key_value_heads=8, sliding_window=None),
    **floats(rms_norm_eps=1e-5),
    **numbers(rope_theta=1e6),
}
FAMILY = Family("mixtral", "MixtralForCausalLM", FIELDS, windows=windows.alike, experts=_experts)
