"""A checksum that threads can compute in parts, in any order: a sum over the data's words.

w[i] are the data's words (8 bytes, little endian; the last zero-padded); arithmetic is modulo 2^64:

    k[i] = key + i * STEP                             key = blend(seed + STEP)
    sum  = sum over i of spread(w[i] ^ k[i]) * (k[i] | 1)
    spread(x): x = (x ^ x >> 32) * FIRST; x = (x ^ x >> 29) * SECOND; x ^ x >> 32
    blend(x) = spread(x) again spread
    checksum = blend(sum + num_bytes * STEP)

Every step from a word to the sum is invertible, so any change within one word changes the checksum.
Other damage (words that trade places or move, the same bits flipped in several words, another
length) passes with a probability of about 2^-64. It detects faults, not forgery: neither seed nor
sum is secret.

Origin: the shifts and multiplications are those of the finalisers of MurmurHash3 and splitmix64
(public domain), with their constants; the factor k[i] | 1 keeps equal differences of two words from
cancelling.
"""

from __future__ import annotations

import torch

from baton_kernels.dispatch import op

WORD_BYTES = 8
MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def key_of(seed: int) -> int:
    """Key of a payload's sum. seed: any 64 bits."""
    return _blend(seed + STEP)


def checksum_of(total: int, num_bytes: int) -> int:
    """Finish a checksum: `total` is the sum over the words, signed or unsigned."""
    return _blend(total + num_bytes * STEP)


@op
def word_sum(words: torch.Tensor, key: int, first_word: int = 0) -> torch.Tensor:
    """Sum over int64 words [n]; the first has index `first_word` in its data. Returns int64 [], on
    their device."""
    keys = torch.arange(len(words), device=words.device).add_(first_word)
    keys = keys.mul_(_signed(STEP)).add_(_signed(key))
    x = words ^ keys
    x = (x ^ _shifted(x, 32)) * _signed(FIRST)
    x = (x ^ _shifted(x, 29)) * _signed(SECOND)
    return ((x ^ _shifted(x, 32)) * (keys | 1)).sum()


def host_checksum(data: torch.Tensor, seed: int) -> int:
    """The checksum of uint8 [num_bytes] in host memory."""
    key, num_bytes = key_of(seed), len(data)
    num_whole = num_bytes // WORD_BYTES * WORD_BYTES
    rest = data.new_zeros(WORD_BYTES)
    rest[: num_bytes - num_whole] = data[num_whole:]
    total = 0
    if num_whole:
        total += int(word_sum(_words(data[:num_whole]), key))
    if num_whole < num_bytes:
        total += int(word_sum(_words(rest), key, num_whole // WORD_BYTES))
    return checksum_of(total, num_bytes)


def _words(data: torch.Tensor) -> torch.Tensor:
    """View uint8 [8 * n] as int64 [n]; copies if not aligned to 8 bytes."""
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()
    return data.view(torch.int64)


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> count) & ((1 << 64 - count) - 1)


def _signed(value: int) -> int:
    """Reinterpret 64 unsigned bits as int64."""
    return (value & MASK) - ((value & 1 << 63) << 1)


def _spread(x: int) -> int:
    x &= MASK
    x = (x ^ x >> 32) * FIRST & MASK
    x = (x ^ x >> 29) * SECOND & MASK
    return x ^ x >> 32


def _blend(x: int) -> int:
    return _spread(_spread(x))
