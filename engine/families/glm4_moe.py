"""GLM-4.5 and 4.6: partial rotation, grouped experts by sigmoid, and shared experts."""

from engine.families.experts import in_groups
from engine.families.family import Family
from engine.families.fields import COMMON, bools, floats, ints

FIELDS = {
    **COMMON,
    **ints(vocab_size=151552, intermediate_size=10944, num_hidden_layers=46),
    **ints(num_attention_heads=96, num_key_value_heads=8, max_position_embeddings=131072),
    **ints(moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1),
    **ints(n_routed_experts=128, n_group=1, topk_group=1, first_k_dense_replace=1),
    **floats(rms_norm_eps=1e-5, partial_rotary_factor=0.5, routed_scaling_factor=1.0),
    **bools(attention_bias=False, norm_topk_prob=True, use_qk_norm=False),
}
FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    FIELDS,
    experts=in_groups,
    has_output_bias=False,
    has_mtp_layers=True,
)
