"""Divides a step's sequences among ranks with the same attention weights: each goes whole to the
rank that has fewest tokens."""

from __future__ import annotations

from engine.interface import Batch
from engine.ranks.token_shares import Piece, TokenShare, share_of


def divide_sequences(batch: Batch, size: int) -> tuple[TokenShare, ...]:
    """The shares of `size` ranks; some may have no sequences."""
    pieces: list[list[Piece]] = [[] for _ in range(size)]
    num_tokens = [0] * size
    lengths = [len(part.token_ids) for part in batch.slices]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = num_tokens.index(min(num_tokens))
        pieces[rank].append(Piece(index, 0, lengths[index]))
        num_tokens[rank] += lengths[index]
    return tuple(share_of(batch, sorted(own)) for own in pieces)
