"""Python does not look for garbage in the middle of a step, however many sequences it has."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from bench.host_rig import HostRig
from bench.stub_engine import BLOCK_SIZE
from worker_core.worker import collect_garbage_less_often

_NUM_SEQS = 500


@pytest.fixture
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.slow
@pytest.mark.usefixtures("threshold")
def test_a_step_makes_fewer_objects_than_are_looked_for() -> None:
    collect_garbage_less_often(_NUM_SEQS)
    rig = HostRig(_NUM_SEQS, BLOCK_SIZE, 4 * _NUM_SEQS)
    rig.step(rig.opening)
    rig.step()
    gc.collect()
    looks: list[str] = []

    def look(phase: str, _info: dict[str, int]) -> None:
        looks.append(phase)

    gc.callbacks.append(look)
    try:
        told = rig.step()
    finally:
        gc.callbacks.remove(look)
    assert len(told) == _NUM_SEQS
    assert not looks


@pytest.mark.usefixtures("threshold")
def test_few_sequences_leave_it_as_it_is() -> None:
    before = gc.get_threshold()
    collect_garbage_less_often(1)
    assert gc.get_threshold() == before
