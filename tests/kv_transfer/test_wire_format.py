"""Chunks cover a range exactly once, and coverage notices when they do not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.types import KvLayout
from engine.kv.layout import groups_of
from engine.kv.range import KvRange
from kv_transfer.ticket import Coverage
from kv_transfer.wire_format import chunks, wire_format

quick = settings(deadline=None, database=None, max_examples=100)
LAYOUT = KvLayout("m", 3, 1, 1, "float32", 4)
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
@given(
    st.lists(st.tuples(PIECES, st.booleans()), max_size=25),
    st.integers(0, 9),
    st.integers(0, 20),
    st.sets(st.integers(0, 4)),
)
def test_coverage_agrees_with_a_set_of_cells(pieces, start, length, windowed):
    """Whether a piece comes as it is, or cut by groups."""
    layout = replace(
        LAYOUT, num_layers=5, window=100 * bool(windowed), windowed_layers=tuple(sorted(windowed))
    )
    coverage, seen = Coverage(groups_of(layout)), set()
    for piece, by_group in pieces:
        is_new = not (cells(piece) & seen)
        if by_group and is_new:
            assert all(coverage.add(part) for part in groups_of(layout).split(piece))
        else:
            assert coverage.add(piece) is is_new
        if is_new:
            seen |= cells(piece)
    end = start + length
    whole = set(itertools.product(range(start, end), range(5)))
    assert coverage.whole_start(start, end) == (start if seen == whole else None)


@quick
@given(st.permutations(range(4)), st.data())
def test_windowed_layers_may_lack_what_is_behind_the_window(order, data):
    first, end, window = data.draw(st.integers(0, 5)), 20, data.draw(st.integers(1, 25))
    windowed = tuple(sorted(data.draw(st.sets(st.integers(0, 3), min_size=1))))
    layout = replace(LAYOUT, num_layers=4, window=window, windowed_layers=windowed)
    coverage, starts = Coverage(groups_of(layout)), []
    for layer in order:
        start = data.draw(st.integers(first, end)) if data.draw(st.booleans()) else first
        starts.append((layer, start))
        if start < end:
            coverage.add(KvRange(start, end - start, layer, 1))
    is_enough = all(
        start == first or (layer in windowed and start <= end - window + 1)
        for layer, start in starts
    )
    latest = max(start for _, start in starts)
    assert coverage.whole_start(first, end) == (latest if is_enough else None)


@quick
@given(PIECES, st.integers(0, 40), st.sets(st.integers(0, 5)))
def test_of_windowed_layers_goes_what_is_in_the_window(piece, window_start, windowed):
    layout = replace(
        LAYOUT, num_layers=6, window=bool(windowed), windowed_layers=tuple(sorted(windowed))
    )
    found = list(groups_of(layout).kept(piece, window_start))
    by_group = list(groups_of(layout).kept(piece, window_start, by_group=True))
    wanted = {
        (token, layer)
        for token, layer in cells(piece)
        if layer not in windowed or token >= window_start
    }
    assert sum(len(cells(part)) for part in found) == len(wanted)
    assert set().union(*map(cells, found)) == wanted
    assert sum(len(cells(part)) for part in by_group) == len(wanted)
    assert {
        (token, groups_of(layout).layers(part.group)[layer])
        for part in by_group
        for token, layer in cells(part)
    } == wanted
    assert len(by_group) <= 2, "one range of each group"
    if window_start <= piece.first_token:
        assert found == [piece]


@quick
@given(st.data())
def test_a_range_that_came_in_any_order_is_whole(data):
    piece = KvRange(2, data.draw(st.integers(1, 20)), 0, 3)
    found = list(chunks(piece, 1, data.draw(st.integers(1, 30))))
    coverage = Coverage(groups_of(LAYOUT))
    for chunk in data.draw(st.permutations(found)):
        assert coverage.whole_start(piece.first_token, piece.end_token) is None
        assert coverage.add(chunk)
    assert coverage.whole_start(piece.first_token, piece.end_token) == piece.first_token


STATEFUL = replace(LAYOUT, num_state_layers=3, state_layer_bytes=40)


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        groups_of(STATEFUL).records_after(8),
        (replace(groups_of(STATEFUL).records_after(9)[0], num_layers=2),),
        groups_of(STATEFUL).records_after(9) + groups_of(STATEFUL).records_after(8),
    ],
)
def test_a_commit_needs_all_states_after_its_last_token_and_no_others(pieces):
    coverage = Coverage(groups_of(STATEFUL))
    assert coverage.add(KvRange(0, 9, 0, STATEFUL.num_layers))
    for piece in pieces:
        assert coverage.add(piece)
    assert coverage.whole_start(0, 9) is None


@pytest.mark.parametrize("max_chunk_bytes", [40, 80, 10_000])
def test_states_come_in_chunks_of_whole_layers(max_chunk_bytes):
    coverage, (whole,) = Coverage(groups_of(STATEFUL)), groups_of(STATEFUL).records_after(9)
    assert coverage.add(KvRange(0, 9, 0, STATEFUL.num_layers))
    # KV is, states are not.
    wire = wire_format("int8", STATEFUL)
    cut = list(chunks(whole, wire.piece_layer_bytes(whole), max_chunk_bytes))
    assert sum(wire.num_bytes(piece) for piece in cut) == groups_of(STATEFUL).record_bytes
    for piece in cut:
        assert wire.num_bytes(piece) <= max_chunk_bytes
        assert coverage.add(piece)
        assert not coverage.add(piece)
    assert coverage.whole_start(0, 9) == 0
