"""bench.engine: its floors, and that each figure gets its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engine import floor_s, floors_of, prompt_floor_s
from bench.peers.comparison import Result
from bench.peers.figures import Figure
from bench.roof import Roof
from engine.families.config import ModelConfig
from engine.families.read import read_config
from engine.memory_plan import num_parameters
from tests.support.tiny_models import make_tiny_model

ROOF = Roof(read_bytes_per_s=1e9, flops_per_s=1e10)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_config(make_tiny_model(tmp_path_factory.mktemp("model")))


def test_one_sequence_is_bound_by_reading_and_many_by_computing(config: ModelConfig) -> None:
    slow_memory, slow_compute = Roof(1e6, 1e30), Roof(1e30, 1e6)
    alone = floor_s(config, "bfloat16", 1, 100, slow_memory)
    assert floor_s(config, "bfloat16", 2, 100, slow_memory) < 2 * alone
    twice = floor_s(config, "bfloat16", 2, 100, slow_compute)
    assert twice == pytest.approx(2 * floor_s(config, "bfloat16", 1, 100, slow_compute))
    assert floor_s(config, "bfloat16", 1, 200, slow_memory) > alone


def test_int8_reads_half_as_much(config: ModelConfig) -> None:
    whole, rounded = (
        floor_s(config, dtype, 1, 0, Roof(1.0, 1e30)) for dtype in ("bfloat16", "int8")
    )
    assert whole <= 2 * num_parameters(config)
    assert rounded == whole / 2


def test_a_longer_prompt_takes_more_than_its_share(config: ModelConfig) -> None:
    """Attention grows with the square."""
    assert prompt_floor_s(config, 2000, ROOF) > 2 * prompt_floor_s(config, 1000, ROOF)


def test_each_figure_has_floors_of_its_own_type_and_batch() -> None:
    def figure(dtype: str, batch: int) -> Figure:
        return Figure("box", dtype, "baton", batch, 100, 6, 5, 10.0, 1.0, 1.0, None)

    figures = (figure("bfloat16", 1), figure("bfloat16", 8))
    one, eight = floors_of(Result(figures, (), ROOF))
    assert one.step_ms < eight.step_ms
    assert one.prompt_ms == eight.prompt_ms
    box = read_config(Path(__file__).parents[2] / "models" / "baton-py-6m")
    assert one.step_ms == pytest.approx(floor_s(box, "bfloat16", 1, 103, ROOF) * 1e3)
