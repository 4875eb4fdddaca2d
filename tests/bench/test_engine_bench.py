"""bench.engine: its floors, its contenders' tasks, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.model.config import ModelConfig, read_config
from bench.engine import Figure, ask, contender_process, floor_s, prompt_floor_s, table
from bench.engine_contenders import BatonContender, Task, prompts_of
from bench.roof import Roof
from tests.support.tiny_models import make_tiny_model

ROOF = Roof(read_bytes_per_s=1e9, bf16_flops_per_s=1e10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model: Path) -> ModelConfig:
    return read_config(model)


def test_one_sequence_is_bound_by_reading_and_many_by_computing(config: ModelConfig) -> None:
    slow_memory, slow_compute = Roof(1e6, 1e30), Roof(1e30, 1e6)
    assert floor_s(config, 2, 100, slow_memory) < 2 * floor_s(config, 1, 100, slow_memory)
    twice = floor_s(config, 2, 100, slow_compute)
    assert twice == pytest.approx(2 * floor_s(config, 1, 100, slow_compute))
    assert floor_s(config, 1, 200, slow_memory) > floor_s(config, 1, 100, slow_memory)


def test_a_longer_prompt_takes_more_than_its_share(config: ModelConfig) -> None:
    """Attention grows with the square."""
    assert prompt_floor_s(config, 2000, ROOF) > 2 * prompt_floor_s(config, 1000, ROOF)


def test_all_contenders_get_the_same_prompts() -> None:
    task = Task(batch=3, context=7, num_steps=2)
    assert prompts_of(task, 100) == prompts_of(task, 100)
    assert [len(prompt) for prompt in prompts_of(task, 100)] == [7, 7, 7]


def test_a_task_is_run_in_this_process_and_in_another(model: Path) -> None:
    here = BatonContender(str(model)).run(Task(2, 20, 4))
    assert len(here.steps_s) == 3
    with contender_process("baton-twins", str(model), 1) as process:
        there = ask(process, 2, 20, 4)
    assert len(there["steps_s"]) == 3
    assert there["prefill_s"] > 0


def test_the_table_has_a_line_for_each_figure() -> None:
    figure = Figure("baton", 8, 500, 2.0, 1.0, 30.0, 0.5, 15.0)
    text = "\n".join(table([figure, figure], ROOF))
    assert text.count("| 8 | baton | 2.00 | 1.00 | 0.50 | 0.50 | 30.0 | 0.50 |") == 2
    assert "1 GB/s read, 10 bf16 GFLOP/s" in text
