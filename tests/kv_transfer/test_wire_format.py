"""Chunks cover a range exactly once, and coverage notices when they do not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.types import KvRange
from kv_transfer.ticket import Coverage
from kv_transfer.wire_format import chunks

quick = settings(deadline=None, database=None, max_examples=100)
PIECES = st.builds(
    KvRange, st.integers(0, 9), st.integers(1, 20), st.integers(0, 2), st.integers(1, 3)
)


def cells(piece: KvRange) -> set[tuple[int, int]]:
    tokens = range(piece.first_token, piece.end_token)
    return set(itertools.product(tokens, range(piece.first_layer, piece.end_layer)))


@quick
@given(PIECES, st.integers(1, 20), st.integers(1, 50), st.integers(1, 9))
@example(KvRange(0, 3, 0, 3), 1, 2, 1).via("two of three layers fit")
def test_chunks_are_small_enough_and_cover_the_range_once(
    piece, token_layer_bytes, factor, block_size
):
    limit = token_layer_bytes * factor
    found = list(chunks(piece, token_layer_bytes, limit, block_size))
    assert all(0 < chunk.num_bytes(token_layer_bytes) <= limit for chunk in found)
    assert sum(len(cells(chunk)) for chunk in found) == len(cells(piece))
    assert set().union(*map(cells, found)) == cells(piece)


@quick
@given(PIECES, st.integers(1, 50), st.integers(1, 9))
def test_blocks_stay_whole_where_one_fits_and_keep_all_layers_where_they_fit(
    piece, limit, block_size
):
    found = list(chunks(piece, 1, limit, block_size))
    if limit >= block_size:
        borders = {chunk.end_token for chunk in found} - {piece.end_token}
        assert all(border % block_size == 0 for border in borders)
    if limit >= block_size * piece.num_layers:
        assert {chunk.num_layers for chunk in found} == {piece.num_layers}


def test_a_chunk_that_cannot_hold_a_token_is_refused():
    with pytest.raises(ValueError, match="cannot hold"):
        list(chunks(KvRange(0, 1, 0, 1), 8, 7))


@quick
@given(st.lists(PIECES, max_size=25), st.integers(0, 9), st.integers(0, 20))
def test_coverage_agrees_with_a_set_of_cells(pieces, start, length):
    coverage, seen = Coverage(5), set()
    for piece in pieces:
        is_new = not (cells(piece) & seen)
        assert coverage.add(piece) is is_new
        if is_new:
            seen |= cells(piece)
    whole = set(itertools.product(range(start, start + length), range(5)))
    assert coverage.is_exactly(start, start + length) is (seen == whole)


@quick
@given(st.data())
def test_a_range_that_came_in_any_order_is_whole(data):
    piece = KvRange(2, data.draw(st.integers(1, 20)), 0, 3)
    found = list(chunks(piece, 1, data.draw(st.integers(1, 30))))
    coverage = Coverage(3)
    for chunk in data.draw(st.permutations(found)):
        assert not coverage.is_exactly(piece.first_token, piece.end_token)
        assert coverage.add(chunk)
    assert coverage.is_exactly(piece.first_token, piece.end_token)
