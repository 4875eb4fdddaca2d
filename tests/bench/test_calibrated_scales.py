"""Rounding with a scale for each row, and with one calibrated scale a tensor."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from bench.calibrated_scales import Calibrated, Subject, by_row, measure, table_of
from tests.support.tiny_models import make_tiny_model


def test_what_is_beyond_the_calibrated_range_is_cut_off() -> None:
    calibrated = Calibrated({})
    calibrated.watch("a", torch.tensor([[3.0, -448.0]]))
    calibrated.watch("a", torch.tensor([[5.0, 7.0]]))
    given = torch.tensor([[1.0, -900.0], [0.0005, 600.0]])
    assert calibrated.rounded("a", given).tolist() == [[1.0, -448.0], [0.0, 448.0]]
    assert by_row("a", torch.tensor([[1.0, -896.0]])).tolist() == [[1.0, -896.0]]


@pytest.mark.slow
def test_both_ways_cost_something(tmp_path: Path) -> None:
    rng = random.Random(0)
    windows = [[rng.randrange(64) for _ in range(30)] for _ in range(4)]
    subject = Subject(str(make_tiny_model(tmp_path, "llama")))
    found = list(measure(subject, windows[:2], windows[2:]))
    assert [q.what for q in found] == ["nothing", *["inputs of layers"] * 2, *["KV"] * 2]
    assert found[0].divergence == 0
    assert all(q.divergence > 1e-9 for q in found[1:])
    for rows, calibrated in (found[1:3], found[3:5]):
        assert rows.divergence != calibrated.divergence
        assert rows.num_better + calibrated.num_better == 2
    # Nothing stays rounded.
    again = next(measure(subject, windows[:2], windows[2:]))
    assert again == found[0]
    assert len(table_of(found, 2).splitlines()) == 7
