"""Predicted times beside measured ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.peers.task import Answer, Task
from bench.plan_accuracy import BOUND, Row, accuracy_table, best_of, least_of, rows_of
from engine.plan.devices import HostCosts
from engine.plan.host import CpuProbe, Heads, share_of
from engine.plan.host_costs import host_costs, measure_hosts
from engine.plan.roofline import prompt_s, step_s
from engine.ranks.mesh import Degrees
from tests.support.planned import LLAMA_8B, device_of, sizes_of


def test_rows_compare_the_best_of_both_sides() -> None:
    sizes, device, task = sizes_of(LLAMA_8B), device_of(), Task(2, 100, 8)
    slow, fast = Answer(3.0, (0.5, 0.4), ()), Answer(2.0, (0.3, 0.9), ())
    step, prompt = rows_of("x", sizes, {2: share_of(device, 2)}, {2: {task: [slow, fast]}})
    assert (step.measured_ms, prompt.measured_ms) == (300, 1000)
    own = share_of(device, 2)
    assert step.predicted_ms == step_s(sizes, Degrees(2), own, 2, 104) * 1e3
    assert prompt.predicted_ms == prompt_s(sizes, Degrees(2), own, 100, 8192) * 1e3


def test_the_table_counts_what_keeps_the_bound() -> None:
    row = Row("x", 1, "step", 1, 100, 90.0, 100.0)
    assert row.deviation == pytest.approx(-0.1)
    rows = [row, replace(row, predicted_ms=130.0)]
    document = {
        "started": "2026-01-01T00:00:00+00:00",
        "command": [],
        "machine": {"cpu": "x", "num_cores": 1, "load_average": [0.0]},
        "versions": {},
        "rows": [{name: getattr(each, name) for name in Row.__dataclass_fields__} for each in rows],
    }
    text = accuracy_table(document)
    assert f"Within {BOUND:.0%}: 1 of 2." in text
    assert "+30%" in text


def test_the_best_rates_are_kept() -> None:
    one, other = device_of(read=2.0, flops=5.0), device_of(read=3.0, flops=4.0)
    best = best_of([one, other])
    assert (best.read_bytes_per_s, best.flops_per_s["bfloat16"]) == (3.0, 5.0)
    rates = [(1.0, 5.0), (2.0, 4.0)]
    best = best_of([replace(one, attention_flops_per_s=each) for each in rates])
    assert best.attention_flops_per_s == (2.0, 5.0)


def test_the_least_costs_are_kept() -> None:
    costs = [HostCosts(1.0, 5.0, 3.0, 4.0), HostCosts(2.0, 4.0, 3.0, 9.0)]
    assert least_of(costs) == HostCosts(1.0, 4.0, 3.0, 4.0)


def test_what_ranks_add_to_a_layer_is_of_its_exchanges() -> None:
    costs = host_costs({1: HostCosts(1.0, 2.0, 3.0), 2: HostCosts(4.0, 5.0, 11.0)})
    assert costs == {1: HostCosts(1.0, 2.0, 3.0), 2: HostCosts(4.0, 5.0, 3.0, 2.0)}


@pytest.mark.slow
def test_the_costs_of_one_rank_are_measured() -> None:
    num_threads = torch.get_num_threads()
    costs = measure_hosts([1], "float32")[1]
    assert torch.get_num_threads() == num_threads
    assert min(costs.step_s, costs.sequence_s, costs.layer_s) >= 0 == costs.exchange_s
    assert costs.step_s + costs.layer_s > 0


@pytest.mark.long
def test_the_costs_of_ranks_are_measured() -> None:
    costs = measure_hosts([1, 2], "float32")
    assert 0 < costs[1].layer_s == costs[2].layer_s
    assert costs[1].exchange_s == 0 < costs[2].exchange_s
    assert costs[1].step_s < costs[2].step_s


@pytest.mark.slow
def test_a_machine_is_measured_and_shared() -> None:
    device = CpuProbe(4 << 20, "float32", Heads(4, 2, 32)).measure(1)
    assert device.attention_flops_per_s is not None
    assert min(device.attention_flops_per_s) > 0
    assert device.adds_up
    assert 0 < device.few_rows_share <= 1
    own = share_of(device, 2)
    assert own.flops_per_s["float32"] == device.flops_per_s["float32"] / 2
    assert own.memory_bytes == device.memory_bytes // 2
