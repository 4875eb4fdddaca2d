"""The pairs of degrees that are compared, and their table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from baton.check.run import Verdict
from bench.rank_matrix import ALL, MODELS, check_model, matrix_table, pairs, row_of, shape_of


def test_each_model_has_each_degree_once_on_either_tier_and_no_pair_is_twice() -> None:
    found = [list(pairs(index)) for index in range(len(MODELS))]
    for of_model in found:
        for tier in zip(*of_model, strict=True):
            assert Counter(tier) == Counter(ALL)
    assert len({pair for of_model in found for pair in of_model}) == len(MODELS) * len(ALL)
    assert not any(prefill == decode for of_model in found for prefill, decode in of_model)


def test_a_table_names_pairs_that_differ() -> None:
    numbered = list(enumerate(pairs(0)))
    verdicts = [
        Verdict(shape_of("dense", number, *pair), 4 - number % 2, 4, 9, 4, 1.0, None)
        for number, pair in numbered
    ]
    machine = {"cpu": "some", "num_cores": 2, "load_average": [1.0, 1.0, 1.0]}
    text = matrix_table(
        {
            "rows": [row_of("dense", verdict) for verdict in verdicts],
            "machine": machine,
            "versions": {},
            "started": "2026-01-01T00:00:00+00:00",
            "command": ["python"],
        }
    )
    (line,) = (line for line in text.splitlines() if "Llama" in line)
    _, _, equal, different, moved, _ = line.split("|")
    assert (equal.count("→"), different.count("→")) == (3, 3)
    assert "1x1→2x1" in equal
    assert "2x1→4x1 gr" in different
    assert moved.strip() == "24 of 24"


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
async def test_tokens_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    """Pairs of workers of at most two ranks."""
    verdicts: list[Verdict] = []
    assert not await check_model(name, tmp_path, 2, 8, verdicts.append)
    assert verdicts
    for verdict in verdicts:
        assert verdict.is_equal, verdict.shape.name
        assert verdict.num_handed_over
