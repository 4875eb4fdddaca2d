"""How many steps are under way at once, by what was asked for and what the engine can do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.config import DecodeOptions
from baton.errors import ConfigError
from baton.types import NumericsClass
from engine.interface import EngineSpec
from engine.oracle import OracleEngine, OracleOptions
from worker_core.speculation.speculator import speculative_method
from worker_core.worker import max_num_launches

SPEC = OracleEngine(OracleOptions(num_blocks=8)).spec


def options(*, method: str = "none", is_asked: bool | None = None) -> DecodeOptions:
    return DecodeOptions(model="m", speculative_method=method, async_scheduling=is_asked)  # type: ignore[arg-type]


def num_launches(options: DecodeOptions, spec: EngineSpec) -> int:
    has_drafts = speculative_method(options, spec) != "none"
    return max_num_launches(options.async_scheduling, spec, has_drafts=has_drafts)


@pytest.mark.parametrize(
    ("method", "is_asked", "computes_aside", "expected"),
    [
        ("none", None, True, 2),
        ("ngram", None, True, 1),
        ("none", None, False, 1),
        ("none", True, False, 2),
        ("none", False, True, 1),
        ("auto", True, False, 2),
        ("auto", None, True, 1),
    ],
)
def test_two_where_it_is_of_use_or_asked_for(
    method: str, is_asked: bool | None, computes_aside: bool, expected: int
) -> None:
    spec = replace(SPEC, computes_aside=computes_aside)
    assert num_launches(options(method=method, is_asked=is_asked), spec) == expected


def test_a_pipeline_has_one_for_each_stage_and_no_drafts_unless_told_to() -> None:
    spec = replace(SPEC, max_num_launches=3, is_pipelined=True)
    assert num_launches(options(method="auto"), spec) == 3
    assert num_launches(options(method="auto", is_asked=False), spec) == 1
    assert num_launches(options(method="ngram"), spec) == 1


def test_an_engine_that_can_have_one_has_one_or_says_why_not() -> None:
    spec = replace(SPEC, max_num_launches=1)
    assert num_launches(options(), spec) == 1
    with pytest.raises(ConfigError, match="tensor-parallel-size 1"):
        num_launches(options(is_asked=True), spec)


def test_layers_with_a_state_allow_neither_drafts_nor_steps_ahead() -> None:
    stateful = replace(SPEC.layout, num_state_layers=1, state_layer_bytes=4)
    spec = replace(SPEC, layout=stateful, max_num_launches=1)
    assert speculative_method(options(method="auto"), spec) == "none"
    for method in ("ngram", "mtp"):
        with pytest.raises(ConfigError, match="cannot go back"):
            speculative_method(options(method=method), spec)
    with pytest.raises(ConfigError, match="layers with a state"):
        num_launches(options(method="none", is_asked=True), spec)


def test_a_gpu_is_not_asked_for_drafts_unless_told_to() -> None:
    gpu = replace(SPEC, computes_aside=True, numerics=NumericsClass("cuda"))
    assert speculative_method(options(method="auto"), gpu) == "none"
    assert num_launches(options(method="auto"), gpu) == 2
    assert speculative_method(options(method="ngram"), gpu) == "ngram"
    assert speculative_method(options(method="auto"), SPEC) == "ngram"


def test_sparse_decode_excludes_drafts() -> None:
    auto = DecodeOptions(model="m", attention_backend="sink-window:64")
    assert speculative_method(auto, SPEC) == "none"
    asked = auto.model_copy(update={"speculative_method": "ngram"})
    with pytest.raises(ConfigError, match="sink-window:64 reads a part"):
        speculative_method(asked, SPEC)
