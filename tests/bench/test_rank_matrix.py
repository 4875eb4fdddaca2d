"""The pairs of degrees that are compared, and their table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from baton.check.run import Verdict
from bench.rank_matrix import (
    ALL,
    MODELS,
    PAGE,
    check_model,
    lines_of,
    matrix_table,
    pair_of,
    pairs,
    row_of,
    shape_of,
)
from bench.suite.markdown import part_of


def test_each_model_has_each_degree_once_on_either_tier_and_no_pair_is_twice() -> None:
    found = [list(pairs(index)) for index in range(len(MODELS))]
    for of_model in found:
        for tier in zip(*of_model, strict=True):
            assert Counter(tier) == Counter(ALL)
    assert len({pair for of_model in found for pair in of_model}) == len(MODELS) * len(ALL)
    assert not any(prefill == decode for of_model in found for prefill, decode in of_model)


def document_of(verdicts: list[Verdict]) -> dict[str, Any]:
    machine = {"cpu": "some", "num_cores": 2, "load_average": [1.0, 1.0, 1.0]}
    return {
        "rows": [row_of("dense", verdict) for verdict in verdicts],
        "machine": machine,
        "versions": {},
        "started": "2026-01-01T00:00:00+00:00",
        "command": ["python"],
    }


VERDICTS = [
    Verdict(shape_of("dense", number, *pair), 4 - number % 2, 4, 9, 4, 1.0, None)
    for number, pair in enumerate(pairs(0))
]


def test_a_table_names_pairs_that_differ() -> None:
    text = matrix_table(document_of(VERDICTS))
    (line,) = (line for line in text.splitlines() if "Llama" in line)
    _, _, equal, different, moved, _ = line.split("|")
    assert (equal.count("→"), different.count("→")) == (3, 3)
    assert "1x1→2x1" in equal
    assert "2x1→4x1 gr" in different
    assert moved.strip() == "24 of 24"


@pytest.mark.parametrize("num_earlier", range(1, 6))
def test_pairs_are_added_to_a_table(num_earlier: int) -> None:
    earlier = lines_of(matrix_table(document_of(VERDICTS[:num_earlier])))
    assert len(earlier["dense"].pairs) == num_earlier
    text = matrix_table(document_of(VERDICTS[num_earlier:]), earlier)
    assert lines_of(text) == lines_of(matrix_table(document_of(VERDICTS)))
    assert f"had {pair_of(VERDICTS[num_earlier].shape)} (dense)" in text


def test_the_table_of_the_page_can_be_added_to() -> None:
    found = lines_of(part_of(PAGE.read_text(), "rank-matrix"))
    assert found.keys() == MODELS.keys()
    for index, name in enumerate(MODELS):
        shapes = (shape_of(name, number, *pair) for number, pair in enumerate(pairs(index)))
        assert set(found[name].pairs) <= set(map(pair_of, shapes))


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
