"""RoPE frequencies, bit-identical to transformers', and the choice of frequencies for a token.

All types but `dynamic` and `dynamic_yarn` have one set of frequencies. These two have one per
length n above a limit: in transformers' `generate` all tokens of a prompt of n tokens use the set
for n, an output token at position p uses the set for p + 1, and cached keys keep their rotation.
Baton does the same for any chunking if SequenceSlice.num_prompt_tokens is set; the KV of a prompt
longer than the limit then depends on the prompt's length and must not be shared as a prefix.
Without num_prompt_tokens every token uses the set of its own position, which is the same for
prompts up to the limit. Sets are computed for the lengths of a step.

The limit of `dynamic` is max_position_embeddings, that of `dynamic_yarn` the original length:
YaRN's factor is max(1, n / original), as in https://github.com/jquesnelle/yarn; transformers has no
such type.

`longrope` has two sets; all tokens of an engine use one of them: see ModelConfig.for_length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from baton_kernels.rope import rope_tables
from engine.families.config import ModelConfig

#: Positions of a block of cached cos and sin. A multiple of torch's vector sizes, so that a block
#: has the bits that a larger one has at these positions.
_BLOCK_POSITIONS = 1024

#: cos and sin [tokens, head_dim / 2] of a step's tokens.
Rotation = tuple[torch.Tensor, torch.Tensor]


Number = TypeVar("Number", float, torch.Tensor)

#: For lengths [n] int64 above a limit: frequencies [n, head_dim / 2] float32, and factors of cos
#: and sin [n, 1] float32.
LengthSets = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Rope:
    """inv_freq [1, head_dim / 2] float32 and scaling: the set of all lengths, or of those up to
    `limit` if by_length computes the others'.

    Without by_length, caches cos and sin by blocks of positions. beside: a second Rope for some of
    the model's layers.
    """

    def __init__(
        self,
        inv_freq: torch.Tensor,
        scaling: float,
        beside: Rope | None = None,
        by_length: LengthSets | None = None,
        limit: int = 0,
    ) -> None:
        self.inv_freq = inv_freq
        self.scaling = scaling
        self.limit = limit
        self._beside = beside
        self._by_length = by_length
        self._scaling: float | torch.Tensor = scaling
        if scaling != 1.0 and bool(
            (inv_freq == 0).any()
        ):  # elements that are not rotated must not be scaled
            self._scaling = torch.where(inv_freq[:1] == 0, 1.0, scaling)
        self._cos = self._sin = torch.empty(0)
        self._filled: set[int] = set()
        """Blocks of positions in _cos and _sin that are computed."""

    @property
    def is_dynamic(self) -> bool:
        return self._by_length is not None

    def tables(
        self,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        spans: Sequence[range],
        dtype: torch.dtype,
    ) -> tuple[Rotation, ...]:
        """See compute. spans: ranges that hold all positions, on the host."""
        if self.is_dynamic:
            return self.compute(positions, lengths, dtype)
        self._fill(spans, dtype)
        own = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        if self._beside is None:
            return (own,)
        return (own, *self._beside.tables(positions, lengths, spans, dtype))

    def compute(
        self, positions: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
    ) -> tuple[Rotation, ...]:
        """Rotations by AttentionShape.rope; positions and lengths (see module) [tokens] int64.
        Caches nothing."""
        inv_freq, scaling = self.frequencies(lengths)
        own = rope_tables(positions, inv_freq, scaling, dtype)
        if self._beside is None:
            return (own,)
        return (own, *self._beside.compute(positions, lengths, dtype))

    def frequencies(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Frequencies [tokens or 1, head_dim / 2], and factors of cos and sin, of tokens'
        lengths."""
        if self._by_length is None:
            return self.inv_freq, self._scaling
        where = None
        if lengths.device.type == "cpu":  # elsewhere the host would wait for the number of lengths
            lengths, where = torch.unique(lengths, return_inverse=True)
        inv_freq, scaling = self._by_length(lengths.clamp(min=self.limit + 1))
        is_short = (lengths <= self.limit)[:, None]
        inv_freq = torch.where(is_short, self.inv_freq, inv_freq)
        scaling = torch.where(is_short, self._scaling, scaling)
        return (inv_freq, scaling) if where is None else (inv_freq[where], scaling[where])

    def _fill(self, spans: Sequence[range], dtype: torch.dtype) -> None:
        """Compute the blocks that hold `spans`, unless cached."""
        if self._cos.dtype != dtype:
            self._cos = self._sin = torch.empty(0, dtype=dtype)
            self._filled.clear()
        wanted = {
            block
            for span in spans
            for block in range(span.start // _BLOCK_POSITIONS, -(-span.stop // _BLOCK_POSITIONS))
        }
        for block in sorted(wanted - self._filled):
            self._grow((block + 1) * _BLOCK_POSITIONS)
            first = block * _BLOCK_POSITIONS
            inside = slice(first, first + _BLOCK_POSITIONS)
            positions = torch.arange(inside.start, inside.stop, device=self.inv_freq.device)
            self._cos[inside], self._sin[inside] = rope_tables(
                positions, self.inv_freq, self._scaling, dtype
            )
            self._filled.add(block)

    def _grow(self, num_positions: int) -> None:
        """Make room for positions, the next power of two, without computing them."""
        if num_positions <= len(self._cos):
            return
        shape = 1 << (num_positions - 1).bit_length(), self.inv_freq.shape[1]
        for name in ("_cos", "_sin"):
            before = getattr(self, name)
            # On the host, memory that is not written takes no room.
            table = torch.empty(shape, dtype=before.dtype, device=self.inv_freq.device)
            if self._filled:
                table[: len(before)] = before
            setattr(self, name, table)


def make_rope(config: ModelConfig, device: torch.device) -> Rope:
    """The rotary embedding of a model."""
    local = config.traits.window_rope
    if local is None:
        return _make(config, device)
    alone = replace(config, rope=local, traits=replace(config.traits, window_rope=None))
    return _make(config, device, make_rope(alone, device))


def _make(config: ModelConfig, device: torch.device, beside: Rope | None = None) -> Rope:
    parameters = dict(config.rope.parameters)
    theta, exponent = config.rope.theta, _exponent(config.rotary_dim)
    scaling = 1.0
    match config.rope.rope_type:
        case "dynamic":
            # transformers computes the set of short lengths in double precision, others in single.
            limit = config.max_position_embeddings
            stretch = _dynamic_stretch(config, float(limit))
            inv_freq = _inverse(theta * stretch ** _dynamic_power(config), exponent)
            by_length = partial(_dynamic_sets, config, exponent.to(device))
            return Rope(inv_freq[None].to(device), scaling, beside, by_length, limit)
        case "dynamic_yarn":
            inv_freq = _inverse(theta, exponent)
            parts = _yarn_parts(config, parameters, device)
            by_length = partial(_dynamic_yarn_sets, config, parameters, parts)
            limit = config.rope.original_length
            return Rope(inv_freq[None].to(device), scaling, beside, by_length, limit)
        case "linear":
            inv_freq = _inverse(theta, exponent) / parameters["factor"]
        case "yarn":
            factor = parameters["factor"]
            if factor is None:
                factor = config.max_position_embeddings / config.rope.original_length
            inv_freq = _yarn(_yarn_parts(config, parameters, torch.device("cpu")), factor)
            scaling = float(_yarn_scaling(math.log(max(1.0, factor)), parameters))
        case "longrope":
            inv_freq, scaling = _longrope(config, parameters)
        case "llama3":
            inv_freq = _llama3(_inverse(theta, exponent), parameters)
        case _:
            inv_freq = _inverse(theta, exponent)
    # Elements that are not rotated get frequency 0: see engine.families.layers.
    inv_freq = F.pad(inv_freq, (0, (config.rope_width - config.rotary_dim) // 2))
    return Rope(inv_freq[None].to(device), scaling, beside)


def _exponent(dim: int) -> torch.Tensor:
    """2i / dim as [dim / 2] float32."""
    return torch.arange(0, dim, 2, dtype=torch.float) / dim


def _inverse(theta: float, exponent: torch.Tensor) -> torch.Tensor:
    """theta^-exponent."""
    return 1.0 / (theta**exponent)


def _dynamic_stretch(config: ModelConfig, length: Number) -> Number:
    """Dynamic NTK scaling: the base grows with the context, so that the lowest frequency spans
    it."""
    factor = config.rope.factor
    return factor * length / config.max_position_embeddings - (factor - 1)


def _dynamic_sets(
    config: ModelConfig, exponent: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See LengthSets."""
    # torch's powers of adjacent numbers, in vectors, have other bits than the power of one number,
    # which transformers computes; those of numbers with gaps between are the same.
    apart = torch.empty(len(lengths), 2, device=lengths.device)
    apart[:, 0] = _dynamic_stretch(config, lengths)
    torch.pow(apart[:, 0], _dynamic_power(config), out=apart[:, 1])
    inv_freq = 1.0 / ((config.rope.theta * apart[:, 1:]) ** exponent)
    return inv_freq, torch.ones_like(inv_freq[:, :1])


def _dynamic_power(config: ModelConfig) -> float:
    return config.rope_width / (config.rope_width - 2)


def _dynamic_yarn_sets(
    config: ModelConfig,
    parameters: dict[str, Any],
    parts: tuple[torch.Tensor, torch.Tensor],
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See LengthSets: YaRN with the factor of each length."""
    factors = lengths[:, None].double() / config.rope.original_length
    scaling = torch.zeros_like(factors) + _yarn_scaling(factors.log(), parameters)
    return _yarn(parts, factors.float()), scaling.float()


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


def _yarn(parts: tuple[torch.Tensor, torch.Tensor], factor: Number) -> torch.Tensor:
    """YaRN's frequencies: [dim / 2], or [n, dim / 2] of factors [n, 1]. parts: see _yarn_parts."""
    powers, kept = parts
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_parts(
    config: ModelConfig, parameters: dict[str, Any], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wavelengths without a stretch, and how much of each frequency YaRN keeps: dimensions with
    many turns keep theirs, those with few are interpolated, with a linear ramp between."""
    dim, length = config.rope_width, parameters["original_max_position_embeddings"]

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
    return (config.rope.theta ** _exponent(dim)).to(device), kept.to(device)


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


def _yarn_scaling(log_factor: Number, parameters: dict[str, Any]) -> Number | float:
    """Factor of cos and sin. log_factor: of a factor of at least 1."""
    factor_of_file = parameters.get("attention_factor")
    if factor_of_file is not None:
        return float(factor_of_file)
    own: float | None = parameters.get("mscale")
    all_dims: float | None = parameters.get("mscale_all_dim")
    if own and all_dims:
        return (0.1 * own * log_factor + 1.0) / (0.1 * all_dims * log_factor + 1.0)
    return 0.1 * log_factor + 1.0
