"""The GPU benchmark goes on when an item fails, hangs or kills its process, and tells what
happened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.gpu.report import GOALS, goal_table, goals, shares, table
from bench.gpu.runner import Limits, Outcome, run_items

CHILD = """
import json, os, sys, threading
for line in sys.stdin:
    name = line.strip()
    print("noise", flush=True)
    print(json.dumps({"started": name}), flush=True)
    if name == "hang":
        threading.Event().wait()
    if name == "fail":
        raise RuntimeError("a reason")
    if name == "die":
        os._exit(3)
    print(json.dumps({"name": name, "result": {"ms": 2.0}}), flush=True)
"""


def run(
    names: list[str], tmp_path: Path, item_s: float = 60.0, total_s: float = 60.0
) -> list[Outcome]:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    told: list[Outcome] = []
    command = [sys.executable, str(child)]
    outcomes = run_items(names, command, {}, Limits(item_s, total_s), told.append)
    assert told == outcomes
    return outcomes


def test_the_rest_goes_on(tmp_path: Path) -> None:
    outcomes = run(["a", "fail", "b", "die", "c", "fail"], tmp_path)
    assert [o.name for o in outcomes] == ["a", "fail", "b", "die", "c", "fail"]
    assert [bool(o.failure) for o in outcomes] == [False, True, False, True, False, True]
    assert "a reason" in outcomes[1].failure
    assert outcomes[0].result == {"ms": 2.0}


def test_what_hangs_is_ended(tmp_path: Path) -> None:
    hanging, after = run(["hang", "a"], tmp_path, item_s=0.0)
    assert hanging.failure == "out of time"
    # With no time either it may be done by then.
    assert (after.result, after.failure) in (({"ms": 2.0}, ""), ({}, "out of time"))


def test_what_there_is_no_time_for_is_told(tmp_path: Path) -> None:
    (only,) = run(["a"], tmp_path, total_s=0.0)
    assert "not run" in only.failure


def test_shares_are_of_the_roofs_of_the_same_run() -> None:
    outcomes = [
        Outcome("roof copy", {"ms": 2.0, "bytes": 200.0}),
        Outcome("roof matmul", {"ms": 1.0, "flops": 1000.0}),
        Outcome("memory", {"ms": 4.0, "bytes": 200.0, "flops": 10.0}),
        Outcome("compute", {"ms": 4.0, "bytes": 10.0, "flops": 1000.0}),
        Outcome("bad", {}, "broke\n| down"),
    ]
    found = shares(outcomes)
    assert found["memory"] == 0.5
    assert found["compute"] == 0.25
    assert "bad" not in found
    lines = table(outcomes).splitlines()
    assert len(lines) == 2 + len(outcomes)
    assert "FAILED: broke / down" in lines[-1]
    assert shares(outcomes[2:]) == {}


def test_goals_name_items_that_there_are() -> None:
    pytest.importorskip("triton")
    from bench.gpu.items import ITEMS

    assert {goal.item for goal in GOALS} | {goal.over for goal in GOALS if goal.over} <= set(ITEMS)


def test_goals_are_met_missed_or_not_measured() -> None:
    outcomes = [
        Outcome("roof copy", {"ms": 1.0, "bytes": 100.0}),
        Outcome("roof matmul", {"ms": 1.0, "flops": 100.0}),
        Outcome("attention decode 64 x 4K", {"ms": 2.0, "bytes": 180.0}),
        Outcome("attention decode 64 x 4K contiguous", {"ms": 1.0, "bytes": 180.0}),
    ]
    reached = {goal.text: value for goal, value in goals(outcomes)}
    assert reached["paged decode attention, of the copy roof"] == 0.9
    assert reached["shuffled blocks over contiguous ones"] == 2.0
    rows = goal_table(outcomes).splitlines()[2:]
    assert rows[0].endswith("| met |")
    assert rows[1].endswith("| MISSED |")
    assert all(row.endswith("| not measured |") for row in rows[2:])
