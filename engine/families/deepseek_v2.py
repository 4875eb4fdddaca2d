"""DeepSeek-V2 and V2-Lite: experts by softmax, with or without groups."""

from dataclasses import replace

from engine.families import deepseek
from engine.families.config import ExpertsConfig
from engine.families.experts import in_groups
from engine.families.family import Family
from engine.families.fields import Settings, bools, ints


def _check(settings: Settings) -> None:
    known = {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False, None),
    }
    deepseek.check_known(settings, known)


def _experts(settings: Settings) -> ExpertsConfig:
    found = replace(in_groups(settings), is_sigmoid=False, is_normalised=False, group_top=1)
    if settings["topk_method"] == "group_limited_greedy":
        return found
    return replace(found, num_groups=1, num_chosen_groups=1)


FIELDS = {
    **deepseek.FIELDS,
    **ints(vocab_size=102400, max_position_embeddings=2048),
    **bools(mlp_bias=False),
    "topk_method": ((str, type(None)), "greedy"),
}
FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    FIELDS,
    check=_check,
    experts=_experts,
    latent=deepseek.read_latent,
    traits=deepseek.read_traits,
)
