"""Who computes an engine's attention: what --attention-backend means for a model on a device."""

from __future__ import annotations

import torch

from baton.errors import ConfigError
from baton.model.config import ModelConfig
from baton_kernels.attention_backends import (
    LIBRARIES,
    REFERENCE,
    AttentionBackend,
    load_backend,
    why_not,
)

_OPTION = "attention_backend"


def choose_attention(
    name: str, config: ModelConfig, dtype: str, kv_dtype: str, device: torch.device
) -> AttentionBackend:
    """auto takes Baton's kernels. Raises ConfigError where the named one cannot compute the prompts
    of this model: it would be there, and never be used."""
    if name == "auto":
        return REFERENCE
    if name == REFERENCE.name:
        if device.type != "cuda":
            raise ConfigError.of(_OPTION, name, f"there are no such kernels for {device}; use auto")
        return REFERENCE
    library = LIBRARIES[name]
    if reason := why_not(name):
        raise ConfigError.of(_OPTION, name, reason)
    if library.needs_gpu and (device.type != "cuda" or dtype == "float32"):
        raise ConfigError.of(
            _OPTION, name, f"it computes on GPUs, in 16 bits, not in {dtype} on {device}; use auto"
        )
    if kv_dtype != dtype:
        raise ConfigError.of(
            _OPTION,
            name,
            f"it reads KV of the type that is computed in, {dtype}, not {kv_dtype}; use auto, or "
            "leave out --kv-cache-dtype",
        )
    if why := _own_attention(config):
        raise ConfigError.of(_OPTION, name, f"a {config.family} model has {why}; use auto")
    return load_backend(name)


def _own_attention(config: ModelConfig) -> str:
    """What libraries' attention is not for."""
    traits = config.traits
    if traits.attention_softcap is not None:
        return "soft-capped scores"
    if traits.has_sinks:
        return "attention sinks"
    return "" if traits.latent is None else "latent attention"
