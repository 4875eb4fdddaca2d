"""What `python -m bench.slo_servers` measures, and what it shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.config import ServeOptions
from bench.machine import describe_machine
from bench.measure import Record
from bench.slo import TARGETS
from bench.slo_servers import AGAIN, Cell, Load, app, cells_at, markdown, merged, servers


def record(ttft_s: float, tpot_s: float) -> Record:
    return Record(1.0, 1.0, 9.0, 8, ((1.0 + ttft_s, 1), (1.0 + ttft_s + tpot_s, 1)))


def document(*cells: Cell) -> dict[str, Any]:
    return {
        "machine": describe_machine(),
        "versions": {},
        "started": "2026-01-01T00:00:00+00:00",
        "command": ["python"],
        "repeat": 1,
        "load": asdict(Load(2, 1, 0.3)),
        "cells": [asdict(cell) for cell in cells],
    }


def test_all_contenders_have_two_cores_bounded_memory_and_their_targets() -> None:
    options = servers("models/baton-py-6m", 256 << 20)
    assert len(options) == 5 + len(TARGETS)
    for each in options.values():
        num_workers = each.num_decode_workers + (0 if each.colocated else each.num_prefill_workers)
        assert num_workers * (each.kv_cache_memory_bytes or 0) == 256 << 20
    planned = [each for each in options.values() if each.planner == "on"]
    assert [each.slo for each in planned] == [targets.slo for targets in TARGETS]
    assert sorted(e.max_num_batched_tokens for e in options.values() if e.colocated) == [
        *(64, 256, 2048)
    ]


def test_a_load_is_the_same_for_all_and_prompts_are_scaled() -> None:
    load = Load(num_requests=30, num_before=1, input_scale=0.3)
    assert load.requests(2.0, "a", 30, 100) == load.requests(2.0, "a", 30, 100)
    lengths = [len(request.prompt_token_ids) for request in load.requests(2.0, "a", 30, 100)]
    assert min(lengths) >= 0.3 * 256 - 1
    assert max(lengths) <= 0.3 * 1024 + 1
    others = [len(request.prompt_token_ids) for request in load.requests(2.0, "b", 30, 100)]
    assert others != lengths


def test_a_cell_compares_the_planner_with_the_best_shape_and_a_shape_with_itself() -> None:
    early, late = record(0.5, 0.15), record(2.0, 0.02)
    names = servers("models/baton-py-6m", 256 << 20)
    records = {name: [early, late] for name in names}
    records["chunks of 64"] = [early, early]
    records[AGAIN] = [late, late]
    first, second, _ = cells_at(2.0, records)
    assert first.fixed["chunks of 64"] == 1.0
    assert (first.planned, first.gain, first.noise) == (0.5, -0.5, 0.5)
    assert (second.planned, second.gain, second.noise) == (0.5, 0.0, 0.5)
    text = markdown([document(first), document(second)])
    assert "50% | 50% | **100%** | 50% | 50% | 50% | -50.0 | 50.0 |" in text
    assert "points:  -50.0 (**missed**)" in text
    assert "mean gain, points:  -25.0 (**missed**)" in text


def test_a_call_adds_its_rate_to_the_file_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(
        options: Mapping[str, ServeOptions], rates: Sequence[float], *_: object
    ) -> dict[float, dict[str, list[Record]]]:
        return {rate: {name: [record(0.1, 0.01)] for name in (*options, AGAIN)} for rate in rates}

    monkeypatch.setattr("bench.slo_servers.measure", measured)
    path, page = tmp_path / "a.json", tmp_path / "page.md"
    page.write_text("<!-- begin: slo-servers -->\n<!-- end -->\n")
    for rate in ("4", "1"):
        arguments = ["models/baton-py-6m", "--rate", rate, "--json", str(path), "--doc", str(page)]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    text = page.read_text()
    assert text.count("Measured on ") == 2
    assert text.index("| 1 | early first token") < text.index("| 4 | early first token")
    assert "| 4 | both: 1,200, 50 | **100%** |" in text


def test_rates_of_earlier_calls_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    one, two, new = (
        document(Cell(rate, TARGETS[0], {"split": share}, share, share))
        for rate, share in ((1.0, 0.1), (2.0, 0.2), (2.0, 0.3))
    )
    assert merged(None, one) == merged(path, one) == [one]
    for old in ([one, two], [{**one, "cells": [*one["cells"], *two["cells"]]}]):
        path.write_text(json.dumps({"documents": old}))
        shares = [cell["planned"] for each in merged(path, new) for cell in each["cells"]]
        assert shares == pytest.approx([0.1, 0.3])
