"""Divides a step's tokens among the ranks of a context, which all have the same weights.

A slice of many tokens is cut into 2 * size ranges of equal length, and rank r gets ranges r and 2 *
size - 1 - r (zig-zag order, Llama 3, arXiv 2407.21783, section 3.3.2). A token's attention work
grows with its position, so that each rank has equally many tokens and equal attention work, without
a measured ratio of the two. Other slices go whole to the rank that has fewest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.interface import Batch, SequenceSlice

#: Ranges of a slice begin at multiples of this many tokens, as kernels compute tiles of rows.
ALIGN = 16
#: Tokens of a rank from which on its products are bound by arithmetic, not by reading weights, so
#: that a further rank saves time.
MIN_RANK_TOKENS = 2 * ALIGN


class Piece(NamedTuple):
    """Tokens [first, end) of slice `number` of a batch."""

    number: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenShare:
    """A rank's share of a batch.

    batch: its pieces as slices of their own, which keep the block tables of whole slices. indices:
    the slice of each piece. rows: for each sample row of `batch`, its number among those of the
    whole batch.
    """

    batch: Batch
    indices: tuple[int, ...]
    rows: tuple[int, ...]


def divide(batch: Batch, size: int) -> tuple[TokenShare, ...]:
    """The shares of `size` ranks; empty if one rank alone is as fast."""
    if size == 1 or batch.num_tokens < size * MIN_RANK_TOKENS:
        return ()
    pieces = _pieces([len(part.token_ids) for part in batch.slices], size)
    return tuple(share_of(batch, sorted(own)) for own in pieces) if all(pieces) else ()


def _pieces(lengths: Sequence[int], size: int) -> list[list[Piece]]:
    """Pieces of each rank, for slices of these lengths in tokens."""
    pieces: list[list[Piece]] = [[] for _ in range(size)]
    num_tokens = [0] * size

    def give(rank: int, piece: Piece) -> None:
        pieces[rank].append(piece)
        num_tokens[rank] += piece.end - piece.first

    num_ranges = 2 * size
    is_cut = [length >= num_ranges * ALIGN for length in lengths]
    for index, length in enumerate(lengths):
        if is_cut[index]:
            ends = [length * i // (num_ranges * ALIGN) * ALIGN for i in range(num_ranges)]
            for i, (first, end) in enumerate(zip(ends, [*ends[1:], length], strict=True)):
                give(min(i, num_ranges - 1 - i), Piece(index, first, end))
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not is_cut[index]:
            give(num_tokens.index(min(num_tokens)), Piece(index, 0, lengths[index]))
    return pieces


def share_of(batch: Batch, pieces: Sequence[Piece]) -> TokenShare:
    """The share of a rank with these pieces of a batch."""
    first_rows = [0]
    for part in batch.slices:
        first_rows.append(first_rows[-1] + len(part.rows))
    slices, rows = [], []
    for index, first, end in pieces:
        part = batch.slices[index]
        own = list(_rows_within(part, first, end))
        rows += [first_rows[index] + number for number in own]
        slices.append(
            part._replace(
                token_ids=part.token_ids[first:end],
                start=part.start + first,
                rows=tuple(part.rows[i]._replace(offset=part.rows[i].offset - first) for i in own),
            )
        )
    return TokenShare(Batch(tuple(slices)), tuple(piece.number for piece in pieces), tuple(rows))


def _rows_within(part: SequenceSlice, first: int, end: int) -> Iterator[int]:
    return (i for i, row in enumerate(part.rows) if first <= row.offset < end)
