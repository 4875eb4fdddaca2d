"""Fields of config.json: types and defaults, both as in transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.errors import UnsupportedModel

#: Maximum number of layers: settings of each layer are stored.
MAX_LAYERS = 10_000

#: By name: accepted types, and the default. As in transformers, an int is no float and a bool no
#: int.
Fields = Mapping[str, tuple[tuple[type, ...], Any]]


def _typed(*types: type, **defaults: Any) -> Fields:
    return {name: (types, default) for name, default in defaults.items()}


ints, ints_or_null = partial(_typed, int), partial(_typed, int, type(None))
floats, texts = partial(_typed, float), partial(_typed, str)
numbers, numbers_or_null = partial(_typed, int, float), partial(_typed, int, float, type(None))
bools, bools_or_null = partial(_typed, bool), partial(_typed, bool, type(None))
lists_or_null = partial(_typed, list, type(None))

#: Fields that all families have.
COMMON: Fields = {
    **ints(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32),
    **ints(num_attention_heads=32, max_position_embeddings=32768),
    **ints_or_null(num_key_value_heads=32, head_dim=None),
    **texts(hidden_act="silu"),
    **floats(rms_norm_eps=1e-6),
    **bools(tie_word_embeddings=False),
    "rope_parameters": ((dict, type(None)), None),
}

#: Fields that must be positive.
_SIZES = re.compile(
    "(vocab|hidden|intermediate)_size|num_(hidden_layers|attention_heads|key_value_heads)"
    "|max_position_embeddings|(kv|q)_lora_rank|.*head_dim"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """A config.json: `raw`, and the values of its family's fields, defaults included."""

    family: str
    raw: Mapping[str, Any]
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def read_fields(family: str, known: Fields, raw: Mapping[str, Any]) -> Settings:
    """Read and check the fields of a family. Raises UnsupportedModel."""
    fields: dict[str, Any] = {}
    for name, (types, default) in known.items():
        value = fields[name] = raw.get(name, default)
        if type(value) not in types:
            wanted = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise UnsupportedModel(f"{name}={value!r}: a {family} model has {wanted} there")
        if _SIZES.fullmatch(name) and value is not None and value < 1:
            raise UnsupportedModel(f"{name}={value}: must be positive")
    if fields["num_hidden_layers"] > MAX_LAYERS:
        raise UnsupportedModel(
            f"num_hidden_layers={fields['num_hidden_layers']}: at most {MAX_LAYERS} are known"
        )
    return Settings(family, raw, fields)
