"""Parts of a model's KV."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.types import KvLayout
from engine.kv.part import KvPart, are_of_ranks, covers

LAYOUT = KvLayout("", 6, 4, 8, "float32", 16, window=8, windowed_layers=(1, 3, 4))
WHOLE = KvPart.whole(LAYOUT)


def _grid(num_stages: int, num_shards: int) -> list[KvPart]:
    layers, heads = LAYOUT.num_layers // num_stages, LAYOUT.num_kv_heads // num_shards
    return [
        KvPart(stage * layers, layers, shard * heads, heads)
        for stage in range(num_stages)
        for shard in range(num_shards)
    ]


GRIDS = st.builds(_grid, st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 4]))


@given(GRIDS, GRIDS)
def test_overlaps_of_two_grids_cover_the_whole(one: list[KvPart], other: list[KvPart]) -> None:
    assert covers(one, WHOLE)
    overlaps = [both for a in one for b in other if (both := a.overlap(b))]
    assert covers(overlaps, WHOLE)
    for part in one:
        found = [part.overlap(b) for b in other]
        assert covers([both for both in found if both], part)


@given(GRIDS, st.data())
def test_a_missing_or_double_part_does_not_cover(parts: list[KvPart], data: st.DataObject) -> None:
    one = data.draw(st.sampled_from(parts))
    assert not covers([part for part in parts if part != one], WHOLE)
    assert not covers([*parts, one], WHOLE)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=4, max_size=4))
def test_covering_is_to_contain_each_state_once(states: list[tuple[int, int]]) -> None:
    """Each part has a head, and some layers with a state."""
    whole = KvPart(0, 1, 0, 4, 0, 3)
    parts = [KvPart(0, 1, head, 1, *own) for head, own in enumerate(states)]
    found = Counter(layer for part in parts for layer in part.states)
    is_within = all(part.overlap(whole) == part for part in parts)
    assert covers(parts, whole) is (is_within and found == Counter(whole.states))


RECTANGLES = st.builds(
    KvPart, st.integers(-1, 1), st.integers(0, 2), st.integers(0, 1), st.integers(0, 3)
)


SQUARE = KvPart(0, 2, 0, 2)


@given(st.lists(RECTANGLES, max_size=5))
@example([SQUARE] * 3)
@example([SQUARE, KvPart(0, 0, 0, 1), KvPart(0, 0, 0, 1)])
def test_covering_is_to_contain_each_layer_of_each_head_once(parts: list[KvPart]) -> None:
    found = Counter(place for part in parts for place in product(part.layers, part.heads))
    is_once = found == Counter(product(SQUARE.layers, SQUARE.heads))
    assert covers(parts, SQUARE) is (is_once and all(part.size for part in parts))


def test_whether_many_parts_cover_is_seen_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may send a ticket of hundreds of ranks."""
    compared: list[KvPart] = []
    overlap = KvPart.overlap

    def counted(part: KvPart, other: KvPart) -> KvPart | None:
        compared.append(part)
        return overlap(part, other)

    monkeypatch.setattr(KvPart, "overlap", counted)
    parts = [KvPart(layer, 1, 0, 1) for layer in range(500)]
    assert covers(parts, KvPart(0, 500, 0, 1))
    assert len(compared) <= len(parts)


def test_a_part_has_its_windowed_layers_counted_from_its_first() -> None:
    own = KvPart(3, 3, 2, 2).layout(LAYOUT)
    assert (own.num_layers, own.num_kv_heads, own.windowed_layers, own.window) == (3, 2, (0, 1), 8)
    assert KvPart(5, 1, 0, 4).layout(LAYOUT).window == 0
    assert WHOLE.layout(LAYOUT) == LAYOUT


def test_within_counts_from_the_outer_part() -> None:
    assert KvPart(4, 2, 3, 1).within(KvPart(3, 3, 2, 2)) == KvPart(1, 2, 1, 1)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(0, 1, 0, 2, 0, 2), (0, 1, 2, 2, 0, 2), (1, 1, 0, 4, 2, 1)], True),
        ([(0, 1, 0, 2, 0, 2), (0, 1, 2, 2, 0, 1), (1, 1, 0, 4, 2, 1)], False),
        ([(0, 1, 0, 4, 0, 2), (1, 1, 0, 4, 1, 2)], False),
        ([(0, 1, 0, 4, 0, 2), (1, 1, 0, 4, 0, 0)], False),
        ([(0, 1, 0, 2, 0, 2), (1, 1, 0, 4, 2, 1)], False),
    ],
)
def test_each_rank_of_a_stage_has_its_states(parts: list[tuple[int, ...]], expected: bool) -> None:
    assert are_of_ranks((KvPart(*part) for part in parts), KvPart(0, 2, 0, 4, 0, 3)) is expected
