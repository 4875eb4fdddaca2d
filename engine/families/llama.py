"""Llama 2, Llama 3 and models of the same architecture."""

from baton.errors import UnsupportedModel
from engine.families.family import Family
from engine.families.fields import COMMON, Settings, bools, ints, ints_or_null


def _check(settings: Settings) -> None:
    heads, hidden_size = settings["num_attention_heads"], settings["hidden_size"]
    if hidden_size % heads:
        raise UnsupportedModel(
            f"hidden_size={hidden_size}: must be a multiple of num_attention_heads={heads}"
        )


FIELDS = {
    **COMMON,
    **ints(max_position_embeddings=2048),
    **ints_or_null(num_key_value_heads=None),
    **bools(attention_bias=False, mlp_bias=False),
}
FAMILY = Family("llama", "LlamaForCausalLM", FIELDS, check=_check)
