"""The key of a random draw: what a token's choice depends on besides its logits, and nothing
else."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def draw_key(seed: int, num_output_tokens: int, choice: int) -> tuple[int, int]:
    """Two signed 32-bit words for the draw of one position of one choice.

    Numbers are taken modulo 2^64. Distinct triples give unrelated keys: each number is absorbed by
    a bijective mix.
    """
    state = _mix(seed & _MASK)
    state = _mix(state ^ _mix((num_output_tokens + 0x632BE59BD9B4E019) & _MASK))
    state = _mix(state ^ _mix((choice + 0x9E6C63D0876A9A47) & _MASK))
    return _signed(state & 0xFFFFFFFF), _signed(state >> 32)


def _mix(x: int) -> int:
    """A bijection of 64-bit words that spreads every bit over all."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
