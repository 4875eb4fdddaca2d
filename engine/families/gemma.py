"""Gemma: scaled embeddings, GeGLU, and norm weights with an offset of 1."""

from dataclasses import replace

from baton.errors import UnsupportedModel
from engine.families.config import Traits
from engine.families.family import Family, read_activation
from engine.families.fields import COMMON, Settings, bools, ints, texts

#: Shared by all Gemmas.
FIELDS = {
    **COMMON,
    **ints(vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26),
    **ints(num_attention_heads=8, num_key_value_heads=4, head_dim=256),
    **ints(max_position_embeddings=8192),
    **texts(hidden_act="gelu_pytorch_tanh"),
    **bools(tie_word_embeddings=True, attention_bias=False),
}


def read_traits(settings: Settings, traits: Traits) -> Traits:
    """Shared by all Gemmas."""
    if settings.raw.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention=true: only a causal model is known")
    scale = settings["hidden_size"] ** 0.5
    return replace(traits, norm_offset=1.0, has_wide_norms=True, embedding_scale=scale)


def _activation(settings: Settings) -> str:
    """The name "gelu" means the tanh form, as in transformers."""
    return "gelu_tanh" if settings["hidden_act"] == "gelu" else read_activation(settings)


_OWN = {
    **FIELDS,
    **ints(hidden_size=3072, intermediate_size=24576, num_hidden_layers=28),
    **ints(num_attention_heads=16, num_key_value_heads=16),
}
FAMILY = Family("gemma", "GemmaForCausalLM", _OWN, activation=_activation, traits=read_traits)
