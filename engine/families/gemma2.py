"""Gemma 2: soft-capped scores and logits, a window in every other layer, norms before and after."""

from dataclasses import replace
from functools import partial

from baton.errors import UnsupportedModel
from engine.families import gemma, windows
from engine.families.config import Traits
from engine.families.family import Family, read_activation
from engine.families.fields import Settings, ints_or_null, numbers, numbers_or_null, texts

#: Shared with Gemma 3.
FIELDS = {
    **gemma.FIELDS,
    **windows.FIELDS,
    **texts(hidden_activation="gelu_pytorch_tanh"),
    **numbers(query_pre_attn_scalar=256),
    **ints_or_null(sliding_window=4096),
}


def read_traits(settings: Settings, traits: Traits) -> Traits:
    """Shared with Gemma 3."""
    scale = settings["query_pre_attn_scalar"] ** -0.5
    return replace(gemma.read_traits(settings, traits), norms="around", attention_scale=scale)


def _traits(settings: Settings, traits: Traits) -> Traits:
    return replace(
        read_traits(settings, traits),
        attention_softcap=_softcap("attn_logit_softcapping", settings),
        logit_softcap=_softcap("final_logit_softcapping", settings),
    )


def _softcap(name: str, settings: Settings) -> float | None:
    value: float | None = settings[name]
    if value is not None and not value > 0:
        raise UnsupportedModel(f"{name}={value}: must be positive or null")
    return value


_OWN = {
    **FIELDS,
    **numbers_or_null(final_logit_softcapping=30.0, attn_logit_softcapping=50.0),
}
FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    _OWN,
    windows=windows.alternate,
    activation=partial(read_activation, field="hidden_activation"),
    traits=_traits,
)
