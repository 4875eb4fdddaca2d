"""Qwen 3 with experts, by softmax, in some or all layers."""

from engine.families import windows
from engine.families.config import ExpertsConfig
from engine.families.family import Family
from engine.families.fields import COMMON, Settings, bools, ints, ints_or_null, lists_or_null


def _experts(settings: Settings) -> ExpertsConfig:
    step, dense = settings["decoder_sparse_step"], set(settings["mlp_only_layers"] or ())
    layers = range(settings["num_hidden_layers"])
    return ExpertsConfig(
        tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
        settings["num_experts"] or settings["num_local_experts"],
        settings["num_experts_per_tok"],
        settings["moe_intermediate_size"],
        is_normalised=settings["norm_topk_prob"],
    )


FIELDS = {
    **COMMON,
    **ints(vocab_size=151936, hidden_size=2048, intermediate_size=6144),
    **ints(num_hidden_layers=24, num_key_value_heads=4, decoder_sparse_step=1),
    **ints(moe_intermediate_size=768, num_experts_per_tok=8, num_local_experts=128),
    **ints_or_null(sliding_window=4096, num_experts=None),
    **bools(use_sliding_window=False, attention_bias=False, norm_topk_prob=False),
    **lists_or_null(mlp_only_layers=None),
}
FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    FIELDS,
    windows=windows.alike,
    experts=_experts,
    has_qk_norm=True,
)
