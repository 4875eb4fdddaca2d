"""What copies of a rank's KV wait for."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from baton.types import Sampling
from engine import follower
from engine.interface import Batch
from engine.ranks.rank_spec import RankSpec
from engine.ranks.step_marks import _NUM_KEPT, StepMarks
from tests.engine.ranks.conftest import LoadRanks
from tests.support.drive_engine import whole_prompt
from tests.support.tiny_models import make_tiny_model

PATIENCE_S = 30.0


def marks_of() -> StepMarks:
    """Marks are numbered from 1."""
    return StepMarks(itertools.count(1).__next__)


def test_a_copy_follows_the_first_mark_behind_what_it_needs() -> None:
    marks = marks_of()
    for _command in range(2):
        for layer in range(3):
            marks.layer_done(layer)
        marks.command_done()
    assert [marks.after(1, n) for n in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert [marks.after(2, n) for n in (1, 3, 9)] == [5, 7, 8]
    assert (marks.after(1), marks.after(2)) == (4, 8)


def test_nothing_is_waited_for_before_the_first_command_or_layer() -> None:
    assert marks_of().after(0) is None
    assert marks_of().after(1, 0) is None


def test_a_mark_that_is_gone_is_replaced_by_a_later_one() -> None:
    marks = marks_of()
    for _ in range(_NUM_KEPT + 5):
        marks.command_done()
    assert marks.after(1) == 6


def test_a_copy_waits_for_the_launch() -> None:
    marks, found = marks_of(), []
    thread = threading.Thread(target=lambda: found.append(marks.after(2, 2)))
    thread.start()
    marks.command_done()
    marks.layer_done(0)
    assert thread.is_alive()
    marks.layer_done(1)
    thread.join(PATIENCE_S)
    assert found == [3]


SERVED: list[Any] = []


def serve(_link: Any, _make_pool: Any, _host: str, marks: Any) -> None:
    """The service of a rank's KV here."""
    SERVED.append(marks)


@pytest.mark.parametrize("syncs_layers", [False, True])
def test_a_rank_counts_commands_as_rank_0_does(
    syncs_layers: bool, load_ranks: LoadRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "StepMarks", lambda _: marks_of())
    monkeypatch.setattr(RankSpec, "meets_in_steps", False)  # as on a GPU
    SERVED.clear()
    engine = load_ranks(make_tiny_model(tmp_path, "llama"), 2, kv_service=__name__)
    (marks,), ranks = SERVED, engine.kv_ranks
    assert ranks is not None
    batch = Batch((whole_prompt((5, 77, 200), Sampling(), (3,)),))
    engine.forward(batch, (lambda *_: None) if syncs_layers else None)
    engine._followers._copy(0, [1], [2])  # as where ranks share no memory
    assert ranks.num_commands() == 2
    assert marks.after(2) == 2 + syncs_layers * engine.spec.layout.num_layers


def test_on_a_cpu_a_copy_waits_for_copies_of_blocks_alone(
    load_ranks: LoadRanks, tmp_path: Path
) -> None:
    """Ranks meet in steps. A block that was copied to, released, and reserved again before a step
    would get the copy over what was received."""
    engine = load_ranks(make_tiny_model(tmp_path, "llama"), 2, kv_service=__name__)
    ranks = engine.kv_ranks
    assert ranks is not None
    engine.forward(Batch((whole_prompt((5, 77, 200), Sampling(), (3,)),)))
    assert ranks.num_commands() == 0
    engine._followers._copy(0, [1], [2])
    assert ranks.num_commands() == 2
