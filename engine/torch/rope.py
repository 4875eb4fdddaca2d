"""RoPE frequencies, bit-identical to transformers', and the choice of frequencies for a token.

All types but `dynamic` have one set of frequencies. Dynamic NTK scaling has one per length n above
max_position_embeddings: in transformers' `generate` all tokens of a prompt of n tokens use the set
for n, an output token at position p uses the set for p + 1, and cached keys keep their rotation.
Baton does the same for any chunking if SequenceSlice.num_prompt_tokens is set; the KV of a prompt
longer than max_position_embeddings then depends on the prompt's length and must not be shared as a
prefix. Without num_prompt_tokens every token uses the set of its own position, which is the same
for prompts up to max_position_embeddings.

`longrope` has two sets; all tokens of an engine use one of them: see ModelConfig.for_length.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from baton_kernels.rope import rope_tables
from engine.families.config import ModelConfig

#: Initial number of positions with cached cos and sin; grows to the next power of two as needed.
_FIRST_POSITIONS = 1024

#: cos and sin [tokens, head_dim / 2] of a step's tokens.
Rotation = tuple[torch.Tensor, torch.Tensor]


class Rope:
    """inv_freq [num_sets, head_dim / 2] float32; set i is for the length first_length + i (set 0:
    also for all shorter ones).

    With a single set, caches cos and sin of all positions up to the highest one requested. beside:
    a second Rope for some of the model's layers.
    """

    def __init__(
        self,
        inv_freq: torch.Tensor,
        scaling: float,
        first_length: int,
        beside: Rope | None = None,
    ) -> None:
        self.inv_freq = inv_freq
        self.scaling = scaling
        self.first_length = first_length
        self._beside = beside
        self.is_dynamic = inv_freq.shape[0] > 1
        self._scaling: float | torch.Tensor = scaling
        if scaling != 1.0 and bool(
            (inv_freq == 0).any()
        ):  # elements that are not rotated must not be scaled
            self._scaling = torch.where(inv_freq[:1] == 0, 1.0, scaling)
        self._cos = self._sin = torch.empty(0)

    def tables(
        self, positions: torch.Tensor, lengths: torch.Tensor, end: int, dtype: torch.dtype
    ) -> tuple[Rotation, ...]:
        """See compute; positions are below `end`."""
        if self.is_dynamic:
            return self.compute(positions, lengths, dtype)
        if end > len(self._cos) or self._cos.dtype != dtype:
            self._fill(max(_FIRST_POSITIONS, 1 << (end - 1).bit_length()), dtype)
        own = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        if self._beside is None:
            return (own,)
        return (own, *self._beside.tables(positions, lengths, end, dtype))

    def compute(
        self, positions: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
    ) -> tuple[Rotation, ...]:
        """Rotations by AttentionShape.rope; positions and lengths (see module) [tokens] int64.
        Caches nothing."""
        inv_freq = self.inv_freq
        if self.is_dynamic:
            inv_freq = inv_freq[(lengths - self.first_length).clamp_(min=0)]
        own = rope_tables(positions, inv_freq, self._scaling, dtype)
        if self._beside is None:
            return (own,)
        return (own, *self._beside.compute(positions, lengths, dtype))

    def _fill(self, num_positions: int, dtype: torch.dtype) -> None:
        positions = torch.arange(num_positions, device=self.inv_freq.device)
        self._cos, self._sin = rope_tables(positions, self.inv_freq, self._scaling, dtype)


def make_rope(config: ModelConfig, max_model_len: int, device: torch.device) -> Rope:
    """The frequencies for contexts up to `max_model_len` tokens."""
    local = config.traits.window_rope
    if local is None:
        return _make(config, max_model_len, device)
    alone = replace(config, rope=local, traits=replace(config.traits, window_rope=None))
    return _make(config, max_model_len, device, make_rope(alone, max_model_len, device))


def _make(
    config: ModelConfig, max_model_len: int, device: torch.device, beside: Rope | None = None
) -> Rope:
    longest, parameters = config.max_position_embeddings, dict(config.rope.parameters)
    theta, exponent = config.rope.theta, _exponent(config.rotary_dim)
    scaling = 1.0
    match config.rope.rope_type:
        case "dynamic":
            # transformers computes the first set in double precision, the others in single.
            lengths: list[int | torch.Tensor] = [
                longest,
                *(torch.tensor(length) for length in range(longest + 1, max_model_len + 1)),
            ]
            sets = [_inverse(_dynamic_theta(config, length), exponent) for length in lengths]
            return Rope(torch.stack(sets).to(device), scaling, longest, beside)
        case "linear":
            inv_freq = _inverse(theta, exponent) / parameters["factor"]
        case "yarn":
            inv_freq, scaling = _yarn(config, parameters)
        case "longrope":
            inv_freq, scaling = _longrope(config, parameters)
        case "llama3":
            inv_freq = _llama3(_inverse(theta, exponent), parameters)
        case _:
            inv_freq = _inverse(theta, exponent)
    # Elements that are not rotated get frequency 0: see engine.families.layers.
    inv_freq = F.pad(inv_freq, (0, (config.rope_width - config.rotary_dim) // 2))
    return Rope(inv_freq[None].to(device), scaling, longest, beside)


def _exponent(dim: int) -> torch.Tensor:
    """2i / dim as [dim / 2] float32."""
    return torch.arange(0, dim, 2, dtype=torch.float) / dim


def _inverse(theta: float | torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """theta^-exponent."""
    return 1.0 / (theta**exponent)


def _dynamic_theta(config: ModelConfig, length: int | torch.Tensor) -> float | torch.Tensor:
    """Dynamic NTK scaling: the base grows with the context, so that the lowest frequency spans
    it."""
    factor, dim = config.rope.factor, config.rope_width
    stretch = factor * length / config.max_position_embeddings - (factor - 1)
    return config.rope.theta * stretch ** (dim / (dim - 2))


def _llama3(inv_freq: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, and those between blended."""
    factor, low, high = (
        parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    length = parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    is_long, is_short = wavelength > length / low, wavelength < length / high
    stretched = torch.where(is_long, inv_freq / factor, inv_freq)
    share = (length / wavelength - low) / (high - low)
    blended = (1 - share) * stretched / factor + share * stretched
    return torch.where(is_long | is_short, stretched, blended)


def _yarn(config: ModelConfig, parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN: dimensions with many turns keep their frequency, those with few are interpolated, with
    a linear ramp between. Returns the frequencies and the factor of cos and sin."""
    dim, length = config.rope_width, parameters["original_max_position_embeddings"]
    factor = parameters["factor"]
    if factor is None:
        factor = config.max_position_embeddings / length

    def dimension_of(num_turns: float) -> float:
        """Dimension that makes num_turns turns within the original length."""
        turns = math.log(length / (num_turns * 2 * math.pi))
        return dim * turns / (2 * math.log(config.rope.theta))

    first = dimension_of(parameters.get("beta_fast") or 32)
    last = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    steps = torch.arange(dim // 2, dtype=torch.float)
    kept = 1 - ((steps - first) / width).clamp(0, 1)
    powers = config.rope.theta ** _exponent(dim)
    inv_freq = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return inv_freq, _yarn_scaling(factor, parameters)


def _longrope(config: ModelConfig, parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """LongRoPE: each frequency is divided by its own factor, from one list up to the original
    length and another beyond: see ModelConfig.for_length. Returns the frequencies and the factor of
    cos and sin."""
    factors = torch.tensor(
        parameters["long_factor" if parameters.get("is_long") else "short_factor"]
    )
    inv_freq = 1.0 / (factors.float() * config.rope.theta ** _exponent(config.rotary_dim))
    if (scaling := parameters.get("attention_factor")) is not None:
        return inv_freq, float(scaling)
    original = config.rope.original_length
    factor = parameters.get("factor") or config.max_position_embeddings / original
    return inv_freq, math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _yarn_scaling(factor: float, parameters: dict[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    factor_of_file = parameters.get("attention_factor")
    if factor_of_file is not None:
        return float(factor_of_file)
    own, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return float(scale(own) / scale(all_dims)) if own and all_dims else scale(1)
