"""What `python -m bench.fleet.processes` compares, and what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.types import Slo, StepCosts
from bench.fleet.cluster import Shape
from bench.fleet.processes import (
    Comparison,
    Means,
    app,
    entries_of,
    markdown,
    median_costs,
    simulated,
)
from bench.fleet.worker import Hardware
from worker_core.policy import decode_policy, learned_local_prefill, prefill_policy

COSTS = StepCosts(0.02, 0.0002, 0.02, 0.0002)


def test_costs_are_medians_of_the_workers_that_have_measured_them() -> None:
    decode, prefill = StepCosts(0.02, 0.001), StepCosts(0.0, 0.0, 0.03, 0.0002)
    other = StepCosts(0.04, 0.003)
    assert median_costs([prefill, decode, other]) == StepCosts(0.03, 0.002, 0.03, 0.0002)


def test_slower_steps_are_seen_in_what_is_simulated() -> None:
    spec = Hardware(COSTS).spec
    slo = Slo(1.0, 0.05)
    shape = Shape([prefill_policy(slo), decode_policy(learned_local_prefill(spec, slo))])
    entries = entries_of(20, 2.0, seed=0)
    means = simulated(shape, Hardware(COSTS), entries)
    slow = simulated(shape, Hardware(StepCosts(0.04, 0.0002, 0.02, 0.0004)), entries)
    assert means.tpot_ms == pytest.approx(20.7, abs=3)
    assert slow.tpot_ms > 1.8 * means.tpot_ms
    assert slow.ttft_ms > 1.5 * means.ttft_ms
    assert means.goodput > slow.goodput


def test_the_largest_deviation_counts_in_either_direction() -> None:
    comparison = Comparison("split", Means(200, 20, 5.0), Means(170, 21, 5.1), Hardware(COSTS))
    assert comparison.deviations == pytest.approx((-15.0, 5.0, 2.0))
    text = markdown("Here.", [comparison], 6.0)
    assert "| split | simulated | 170 | 21.0 | 5.10 |" in text
    assert "%: split 15.0 (**missed**)" in text


@pytest.mark.long
def test_processes_and_simulation_serve_the_same_load(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: fleet-processes -->\n<!-- end -->\n", encoding="utf-8")
    settings = ("oracle_step_ms=2", "oracle_token_us=20")
    words = ["--num-requests", "10", "--rate", "20", "--write", str(page)]
    for setting in settings:
        words += ["--set", setting]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert all(f"| {shape} | processes |" in text for shape in ("split", "colocated"))
