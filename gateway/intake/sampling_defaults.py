"""Sampling defaults from a model's generation_config.json, the same fields as vLLM. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from baton.errors import ConfigError
from baton.sampling_params import OPTIONS
from baton.v1 import sampling_pb2
from gateway.intake.rules import limit_violations

_FILE = "generation_config.json"

#: Option by field of the file. As in vLLM, `do_sample` and penalties under other names are ignored.
_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)


def sampling_defaults(generation_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Defaults by option, rounded as requests' values are. Raises ConfigError for values that a
    request could not have."""
    params = sampling_pb2.SamplingParams()
    for field, name in _FIELDS.items():
        value = generation_config.get(field)
        if value is None or (name == "top_k" and value == -1):  # -1 means all, as in vLLM
            continue
        try:
            setattr(params, name, value)
        except (TypeError, ValueError) as error:
            raise _refusal(field, value, str(error)) from None
        limits = OPTIONS[name].limits
        if limits is not None:
            for violation in limit_violations(name, value, limits, vocab_size=0):
                raise _refusal(field, value, violation.description)
    if params.HasField("max_tokens") and not params.max_tokens:
        raise _refusal("max_new_tokens", 0, "must be at least 1")
    return MappingProxyType({field.name: value for field, value in params.ListFields()})


def _refusal(field: str, value: object, why: str) -> ConfigError:
    return ConfigError.of(
        f"{_FILE}'s {field}", value, f"{why}; mend it, or give --generation-config=none"
    )
