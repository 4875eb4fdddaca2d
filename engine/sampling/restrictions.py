"""Tokens that a row may not choose. Without torch, because the oracle engine uses it, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.interface import SampleRow


def allowed_mask(row: SampleRow) -> bytes | None:
    """row.allowed, without what is not in allowed_token_ids; None for all tokens."""
    ids = row.sampling.allowed_token_ids
    if not ids:
        return row.allowed
    mask = _mask_of(ids)
    if row.allowed is None:
        return mask
    both = int.from_bytes(mask, "little") & int.from_bytes(row.allowed, "little")
    return both.to_bytes(len(mask), "little")


@lru_cache(maxsize=256)
def _mask_of(token_ids: tuple[int, ...]) -> bytes:
    """As SampleRow.allowed; cached because few samplings are in use at a time."""
    bits = 0
    for token_id in token_ids:
        bits |= 1 << token_id
    return bits.to_bytes(max(token_ids) // 8 + 1, "little")


def banned_tokens(row: SampleRow) -> frozenset[int]:
    """Tokens that would complete a bad word, and stop tokens before min_tokens. Empty if they would
    leave no allowed token: then `allowed_mask` alone applies, as in transformers."""
    sampling = row.sampling
    is_short = row.num_output_tokens < sampling.min_tokens
    banned = sampling.stop_token_ids if is_short else frozenset[int]()
    if sampling.bad_words:
        banned = banned.union(_completing(sampling.bad_words, row.token_ids))
    mask = allowed_mask(row) if banned else None
    if mask is None or _leaves_any(mask, banned):
        return banned
    return frozenset()


def _leaves_any(allowed: bytes, banned: Iterable[int]) -> bool:
    """Whether any token of the mask is not banned."""
    bits = int.from_bytes(allowed, "little")
    return bits.bit_count() > sum(bits >> token & 1 for token in banned)


def _completing(words: Sequence[Sequence[int]], token_ids: Sequence[int]) -> Iterator[int]:
    """Yield the last token of each word that `token_ids` ends with, except for that token."""
    longest = max(map(len, words)) - 1
    tail = tuple(token_ids[max(0, len(token_ids) - longest) :])
    for word in words:
        num_before = len(word) - 1
        if tail[max(0, len(tail) - num_before) :] == tuple(word[:-1]):
            yield word[-1]


def forbidden_by(masks: Sequence[bytes], vocab_size: int) -> NDArray[np.bool_]:
    """[masks, vocab] bool: tokens that SampleRow.allowed masks forbid. Tokens past a mask's end are
    forbidden."""
    num_bytes = -(-vocab_size // 8)
    packed = np.frombuffer(
        b"".join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks), dtype=np.uint8
    ).reshape(len(masks), num_bytes)
    bits = np.unpackbits(~packed, axis=1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)
