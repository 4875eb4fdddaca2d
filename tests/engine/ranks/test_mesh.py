"""Places of ranks in a mesh, and layers of stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ranks.mesh import Degrees, stage_layers

DEGREES = st.builds(Degrees, *[st.integers(1, 4)] * 3)


@given(DEGREES)
def test_each_rank_has_one_place(degrees: Degrees) -> None:
    places = [degrees.place(rank) for rank in range(degrees.num_ranks)]
    assert len(set(places)) == degrees.num_ranks
    assert [degrees.rank_of(place) for place in places] == list(range(degrees.num_ranks))


@given(DEGREES)
def test_groups_of_each_kind_divide_the_ranks(degrees: Degrees) -> None:
    for groups, size in (
        (degrees.tensor_groups(), degrees.tensor),
        (degrees.context_groups(), degrees.context),
        (degrees.pipelines(), degrees.pipeline),
    ):
        assert sorted(sum(groups, ())) == list(range(degrees.num_ranks))
        assert {len(group) for group in groups} == {size}
    for group in degrees.pipelines():
        assert [degrees.place(rank).stage for rank in group] == list(range(degrees.pipeline))


@given(st.integers(1, 100), st.integers(1, 8))
def test_stages_divide_the_layers_evenly(num_layers: int, num_stages: int) -> None:
    stages = stage_layers(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    lengths = [len(stage) for stage in stages]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(("rank", "place"), [(0, (0, 0, 0)), (3, (0, 1, 1)), (4, (1, 0, 0))])
def test_tensor_ranks_are_adjacent(rank: int, place: tuple[int, int, int]) -> None:
    found = Degrees(tensor=2, pipeline=2, context=2).place(rank)
    assert (found.stage, found.context_rank, found.tensor_rank) == place
