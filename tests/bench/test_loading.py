"""The simulated load is of the models' sizes, and hides nothing that cannot be hidden."""

from __future__ import annotations

import pytest

from bench.loading import SHAPES, Rates, Shape, measure_loading, tensors_of


def test_shapes_have_as_many_parameters_as_the_models() -> None:
    found = [sum(stored.tensor.numel() for stored in tensors_of(shape)) for shape in SHAPES]
    assert found == [8_030_261_248, 70_553_706_496]


@pytest.mark.parametrize(("disk", "link"), [(1e9, 3e9), (3e9, 1e9)])
def test_no_load_is_faster_than_its_slowest_part(disk: float, link: float) -> None:
    shape = Shape("tiny", 256, 512, 4, 2, vocab=1000)
    times = measure_loading(shape, Rates(disk, 1e9, link), speed_up=1.0)
    assert times.bound_s == pytest.approx(times.num_bytes / 1e9)
    assert times.seconds >= times.bound_s
