"""Rotary frequencies, from transformers' own functions, and which of them a token takes.

All types but `dynamic` have one set of frequencies. Dynamic NTK scaling has one per length n above
max_position_embeddings: in transformers' `generate` a prompt of n tokens is rotated by those of n as a whole, and an output
token at position p by those of p + 1; keys stay in the cache as they were rotated. Baton does the same where it is told the
prompt's length (SequenceSlice.num_prompt_tokens), whatever the chunks; KV of a prompt longer than
max_position_embeddings then depends on the prompt's length and must not be shared as a prefix. Where it is not told, every
token takes the frequencies of its own position, which is the same for prompts up to max_position_embeddings.
"""

from __future__ import annotations

from typing import Any

import torch

from baton.model.config import ModelConfig
from baton_kernels.rope import rope_tables

#: Positions whose cos and sin are computed at first; where sequences grow past them, those of the next power of two.
_FIRST_POSITIONS = 1024


class Rope:
    """inv_freq [num_sets, head_dim / 2] float32; set i is for lengths of first_length + i (set 0: all up to it).

    Keeps cos and sin of all positions that were asked for so far, and of those before them, where there is one set.
    """

    def __init__(self, inv_freq: torch.Tensor, scaling: float, first_length: int) -> None:
        self.inv_freq = inv_freq
        self.scaling = scaling
        self.first_length = first_length
        self._cos = self._sin = torch.empty(0)

    @property
    def is_dynamic(self) -> bool:
        return self.inv_freq.shape[0] > 1

    def tables(
        self, positions: torch.Tensor, lengths: torch.Tensor, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See compute; positions are below `end`."""
        if self.is_dynamic:
            return self.compute(positions, lengths, dtype)
        if end > len(self._cos) or self._cos.dtype != dtype:
            self._fill(max(_FIRST_POSITIONS, 1 << (end - 1).bit_length()), dtype)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def compute(
        self, positions: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [tokens, head_dim / 2]; positions and lengths (see module) [tokens] int64. Keeps nothing."""
        inv_freq = self.inv_freq
        if self.is_dynamic:
            inv_freq = inv_freq[(lengths - self.first_length).clamp_(min=0)]
        return rope_tables(positions, inv_freq, self.scaling, dtype)

    def _fill(self, num_positions: int, dtype: torch.dtype) -> None:
        positions = torch.arange(num_positions, device=self.inv_freq.device)
        self._cos, self._sin = rope_tables(positions, self.inv_freq, self.scaling, dtype)


def make_rope(config: ModelConfig, max_model_len: int, device: torch.device) -> Rope:
    """The frequencies for contexts up to `max_model_len` tokens."""
    longest = config.max_position_embeddings
    if config.rope.rope_type == "default":
        return Rope(_default(config).to(device), 1.0, longest)
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # The functions read these fields alone, for every family.
    fields: dict[str, Any] = {
        "hidden_size": config.num_heads * config.head_dim,
        "num_attention_heads": config.num_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": longest,
        "rope_parameters": dict(config.rope.parameters),
    }
    arguments = LlamaConfig(**fields)
    compute = ROPE_INIT_FUNCTIONS[config.rope.rope_type]
    first, scaling = compute(arguments)
    sets = [first]
    if config.rope.rope_type == "dynamic":
        # As a tensor, as in transformers' own update: its arithmetic is float32, a number's is not.
        lengths = range(longest + 1, max_model_len + 1)
        sets += [compute(arguments, seq_len=torch.tensor(n))[0] for n in lengths]
    return Rope(torch.stack(sets).float().to(device), float(scaling), longest)


def _default(config: ModelConfig) -> torch.Tensor:
    """theta^(-2i / head_dim) as [1, head_dim / 2]."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
    return (1.0 / (config.rope.theta**exponent))[None]
