"""A checksum that any number of threads compute in parts, in any order: a sum over the data's
words.

With w[i] the data's words (8 bytes, little endian; the last one filled up with zeros), all of it
modulo 2^64:

    k[i] = key + i * STEP                             key = blend(seed + STEP)
    sum  = sum over i of spread(w[i] ^ k[i]) * (k[i] | 1)
    spread(x): x = (x ^ x >> 32) * FIRST; x = (x ^ x >> 29) * SECOND; x ^ x >> 32
    blend(x) = spread(x) again spread
    checksum = blend(sum + num_bytes * STEP)

Every step from a word to the sum can be undone, so that a change within one word, whichever bits it
flips, always changes the checksum. Other damage (words that trade places or move, the same bits
flipped in several words, another length) passes with a probability of about 2^-64. Neither seed nor
sum is secret: it is against faults, not against forgers.

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
    """The key of a payload's sum. seed: any 64 bits."""
    return _blend(seed + STEP)


def checksum_of(total: int, num_bytes: int) -> int:
    """The checksum of data of `num_bytes`, from the sum over its words, signed or not."""
    return _blend(total + num_bytes * STEP)


@op
def word_sum(words: torch.Tensor, key: int, first_word: int = 0) -> torch.Tensor:
    """The sum over int64 words [n], of which the first is number `first_word` of its data: int64
    [], on their device."""
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
    """uint8 [8 * n] as int64 [n]; a copy if it does not lie at a multiple of 8 bytes of its
    memory."""
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()
    return data.view(torch.int64)


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """int64 bits to the right by so many, zeros from the left."""
    return (x >> count) & ((1 << 64 - count) - 1)


def _signed(value: int) -> int:
    """64 bits as int64 has them."""
    return (value & MASK) - ((value & 1 << 63) << 1)


def _spread(x: int) -> int:
    x &= MASK
    x = (x ^ x >> 32) * FIRST & MASK
    x = (x ^ x >> 29) * SECOND & MASK
    return x ^ x >> 32


def _blend(x: int) -> int:
    return _spread(_spread(x))
