"""OLMo 2: norms after attention and MLP, one norm over the queries of all heads and one over the
keys."""

from dataclasses import replace

from engine.families.config import Traits
from engine.families.family import Family
from engine.families.fields import COMMON, Settings, bools, floats, ints, ints_or_null


def _traits(_: Settings, traits: Traits) -> Traits:
    return replace(traits, norms="after", has_wide_norms=True, has_whole_qk_norm=True)


FIELDS = {
    **COMMON,
    **ints(vocab_size=50304, max_position_embeddings=2048),
    **ints_or_null(num_key_value_heads=None),
    **floats(rms_norm_eps=1e-5),
    **bools(attention_bias=False),
}
FAMILY = Family("olmo2", "Olmo2ForCausalLM", FIELDS, traits=_traits, has_qk_norm=True)
