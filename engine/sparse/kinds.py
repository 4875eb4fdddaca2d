"""Kinds of sparse decode by name: KIND:TOKENS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from baton.errors import ConfigError
from baton_kernels.attention_backends import AttentionBackend
from engine.families.config import ModelConfig
from engine.sparse.backend import BlockChoice, sparse_backend
from engine.sparse.pages import Pages
from engine.sparse.sink_window import SinkWindow

KINDS: Mapping[str, Callable[[int], BlockChoice]] = MappingProxyType(
    {"sink-window": SinkWindow, "pages": Pages}
)
#: Blocks below which a choice would not leave the last one and another.
_FEWEST = 2


def choose_sparse(
    name: str, config: ModelConfig, block_size: int, *, is_scaled: bool, device: torch.device
) -> AttentionBackend:
    """The backend of KIND:TOKENS. is_scaled: whether KV has another type than the computation.
    Raises ConfigError."""
    kind, _, tokens = name.partition(":")
    choice = KINDS[kind](int(tokens) // block_size)
    why = ""
    if choice.most < _FEWEST:
        why = f"it keeps less than {_FEWEST} blocks of {block_size} tokens; give more tokens"
    elif device.type != "cpu":
        why = "sparse decode runs on CPUs; use auto"
    elif config.traits.latent is not None:
        why = f"a {config.family} model has latent attention; use auto"
    elif choice.reads_keys and is_scaled:
        why = "it reads keys of the type that is computed in; leave out --kv-cache-dtype"
    if why:
        raise ConfigError.of("attention_backend", name, why)
    return sparse_backend(f"{name}/{block_size}", choice)
