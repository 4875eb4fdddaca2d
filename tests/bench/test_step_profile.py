"""bench.step_profile: its parts are all there, and its floors are those of bench.engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.load_engine import load_engine
from baton.model.config import read_config
from baton_kernels.cpu.library import library
from bench.engine import floor_s
from bench.roof import Roof
from bench.step_profile import PARTS, STAGES, floors_ms, profile_steps
from tests.support.tiny_models import make_tiny_model

ROOF = Roof(read_bytes_per_s=1e6, flops_per_s=1e30)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_floors_of_the_parts_add_up_to_the_step_s(
    tmp_path: Path, dtype: str, is_tied: bool
) -> None:
    config = read_config(make_tiny_model(tmp_path, tie_word_embeddings=is_tied))
    parts = floors_ms(config, dtype, 100, ROOF)
    assert tuple(parts) == PARTS
    # bench.engine counts norms and biases, too.
    assert sum(parts.values()) == pytest.approx(
        floor_s(config, dtype, 1, 100, ROOF) * 1e3, rel=0.05
    )


@pytest.mark.skipif(library() is None, reason="no native kernels on this machine")
def test_a_step_is_taken_apart_without_being_changed(tmp_path: Path) -> None:
    engine = load_engine(
        str(make_tiny_model(tmp_path)), dtype="bfloat16", num_blocks=20, num_threads=1
    )
    profile = profile_steps(engine, context=20, num_steps=3)
    assert tuple(profile.parts_ms) == PARTS
    assert all(profile.parts_ms[part] > 0 for part in (*STAGES, *PARTS))
    assert profile.step_ms > 0
