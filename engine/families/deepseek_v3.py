"""DeepSeek-V3, R1 and derived models: experts in groups, by sigmoid."""

from engine.families import deepseek
from engine.families.experts import in_groups
from engine.families.family import Family
from engine.families.fields import Settings, bools_or_null, floats, ints, ints_or_null


def _check(settings: Settings) -> None:
    known = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "norm_topk_prob": (True, False),
    }
    deepseek.check_known(settings, known)


FIELDS = {
    **deepseek.FIELDS,
    **ints(vocab_size=129280, hidden_size=7168, intermediate_size=18432),
    **ints(num_hidden_layers=61, num_attention_heads=128, max_position_embeddings=4096),
    **ints(n_routed_experts=256, n_shared_experts=1, moe_intermediate_size=2048),
    **ints_or_null(num_experts_per_tok=8, first_k_dense_replace=3, n_group=8, topk_group=4),
    **floats(routed_scaling_factor=2.5),
    **bools_or_null(norm_topk_prob=True, rope_interleave=True),
}
FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    FIELDS,
    check=_check,
    experts=in_groups,
    latent=deepseek.read_latent,
    traits=deepseek.read_traits,
    has_mtp_layers=True,
)
