"""Chooses the attention kernels: the meaning of --attention-backend for a model on a device."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from baton.errors import ConfigError
from baton_kernels.attention_backends import (
    LIBRARIES,
    REFERENCE,
    AttentionBackend,
    load_backend,
    why_not,
)
from baton_kernels.cpu.library import library, why_none
from engine.families.config import ModelConfig
from engine.sparse.kinds import choose_sparse

_OPTION = "attention_backend"


def choose_attention(
    name: str,
    config: ModelConfig,
    dtype: str,
    kv_dtype: str,
    device: torch.device,
    block_size: int,
) -> AttentionBackend:
    """The backend of this name; auto selects Baton's kernels. Raises ConfigError if the named
    backend cannot compute this model's prompts."""
    if name == "auto":
        return REFERENCE
    if ":" in name:
        return choose_sparse(name, config, block_size, is_scaled=kv_dtype != dtype, device=device)
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


def check_batch_invariant(config: ModelConfig, dtype: str, device: torch.device) -> None:
    """Raise ConfigError unless a row's tokens can be independent of its batch. Native CPU kernels
    always guarantee that."""
    why = ""
    if device.type == "cpu":
        if library() is None:
            why = f"this CPU has no native kernels: {why_none()}"
        elif dtype == "float16":
            why = "products of float16 are torch's on a CPU, which follow the batch; use bfloat16"
    elif find_spec("triton") is None:
        why = "Triton is not installed, whose kernels it needs; pip install triton"
    elif config.traits.experts is not None:
        why = "products of a mixture's experts follow how many rows each has; leave it out"
    elif config.traits.latent is not None:
        why = "products of each head of latent attention follow the number of rows; leave it out"
    elif config.quantization is not None:
        why = "products of quantised weights follow the number of rows; serve the model in 16 bits"
    if why:
        raise ConfigError.of("batch_invariant", True, why)


def _own_attention(config: ModelConfig) -> str:
    """The feature of the model that attention libraries lack; empty if none."""
    traits = config.traits
    if traits.attention_softcap is not None:
        return "soft-capped scores"
    if traits.has_sinks:
        return "attention sinks"
    return "" if traits.latent is None else "latent attention"
