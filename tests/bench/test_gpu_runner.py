"""The GPU benchmark goes on when an item fails, hangs or kills its process, and tells what
happened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.gpu.report import GOALS, goal_table, goals, shares, table
from bench.gpu.runner import Limits, Outcome, rehearse, run_items

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


def test_what_the_sanitizer_runs_is_shown_as_it_comes(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    from bench.gpu.sanitizer import streamed

    status, output = streamed([sys.executable, "-c", "print('case a'); raise SystemExit(3)"])
    assert (status, output) == (3, "case a\n")
    assert capfd.readouterr().err == "case a\n"


def test_what_there_is_no_time_for_is_told(tmp_path: Path) -> None:
    (only,) = run(["a"], tmp_path, total_s=0.0)
    assert "not run" in only.failure


def test_each_is_told_when_it_is_done_and_not_at_the_end(tmp_path: Path) -> None:
    """So that a call that is cut off loses the item that ran, and no other."""
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    seen: list[str] = []

    def cut_off(outcome: Outcome) -> None:
        seen.append(outcome.name)
        if outcome.name == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_items(["a", "b", "hang"], [sys.executable, str(child)], {}, Limits(60.0, 60.0), cut_off)
    assert seen == ["a", "b"]


def test_an_item_may_have_a_limit_of_its_own() -> None:
    limits = Limits(90.0, 500.0, {"long": 400.0})
    assert (limits.item_limit_s("long"), limits.item_limit_s("other")) == (400.0, 90.0)


def test_a_rehearsal_goes_on_with_all_groups_and_says_what_did_not_run(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    groups = [["a", "fail", "b"], ["c"]]
    outcome = rehearse(groups, [sys.executable, str(child)], {}, Limits(60.0, 60.0))
    assert (outcome.result["num_items"], outcome.result["processes"]) == (3, 2)
    assert "fail: " in outcome.result["not_run"]
    assert "a reason" in outcome.result["not_run"]
    assert not outcome.failure


def test_stages_come_in_the_order_in_which_a_call_should_be_cut_off() -> None:
    pytest.importorskip("triton")
    from bench.gpu.items import ITEMS, LIMITS_S, STAGES, rehearsal_groups

    assert list(STAGES) == [
        *("checks", "roofs", "engine", "peers", "kv", "service", "kernels", "tiles")
    ]
    assert sum(map(len, STAGES.values())) == len(ITEMS)
    checks = {name for name in ITEMS if name.startswith("check ")}
    assert checks < set(STAGES["checks"])
    assert set(LIMITS_S) == {*STAGES["service"], "check memory accesses"}
    # The service runs alone: nothing is rehearsed that it would not use.
    assert rehearsal_groups(["service"], 16) == []
    rehearsed = [name for group in rehearsal_groups(list(STAGES), 16) for name in group]
    assert len(rehearsed) == len(set(rehearsed))
    # Others' kernels, other processes and the roofs, which are torch's.
    left_out = {*STAGES["peers"], *STAGES["service"], *STAGES["roofs"], "check memory accesses"}
    left_out |= {"mixed load, two processes", "cuda_ipc 8K tokens, beside decoding"}
    assert set(rehearsed) == set(ITEMS) - left_out
    assert rehearsal_groups(["peers"], 16) == []


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
