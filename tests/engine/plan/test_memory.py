"""Memory of ranks, and users that fit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.families.read import parse_config
from engine.kv.layout import groups_of
from engine.memory_plan import weight_bytes
from engine.plan.memory import (
    Reserved,
    kv_rows,
    num_users,
    sequence_bytes,
    stage_memory,
    stage_weight_bytes,
)
from engine.ranks.mesh import Degrees
from tests.support.planned import CONFIGS, LLAMA_8B, NAMES, layout_of, sizes_of

DEGREES = st.builds(Degrees, st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
RESERVED = Reserved(1000, None, 24)


@given(NAMES, DEGREES)
def test_the_heaviest_rank_weighs_what_the_worker_plans(name: str, degrees: Degrees) -> None:
    sizes = sizes_of(CONFIGS[name])
    keeps = bool(sizes.storage.levels)
    expected = weight_bytes(parse_config(CONFIGS[name]), "bfloat16", keeps, degrees)
    assert max(stage_weight_bytes(sizes, degrees)) == expected


@given(NAMES, DEGREES)
def test_ranks_hold_at_least_the_whole_model(name: str, degrees: Degrees) -> None:
    sizes = sizes_of(CONFIGS[name])
    (whole,) = stage_weight_bytes(sizes, Degrees())
    ranks = degrees.tensor * sum(stage_weight_bytes(sizes, degrees))
    assert ranks >= whole
    if degrees.tensor == 1:
        norms = (degrees.pipeline - 1) * sizes.norm * 2
        assert ranks <= whole + norms + degrees.pipeline, "stages share nothing but the last norm"


@given(
    NAMES,
    DEGREES,
    st.integers(0, 1 << 24),
    st.lists(st.integers(1, 5000), min_size=2, max_size=6),
    st.booleans(),
)
def test_users_never_rise_with_length_nor_exceed_memory(
    name: str, degrees: Degrees, available: int, lengths: list[int], is_apart: bool
) -> None:
    sizes = sizes_of(CONFIGS[name])
    stages = stage_memory(sizes, degrees, RESERVED, available)
    users = []
    for length in sorted(lengths):
        users.append(num_users(sizes, degrees, stages, length, keeps_windows_apart=is_apart))
        each = sequence_bytes(sizes, degrees, length, keeps_windows_apart=is_apart)
        for stage, one in zip(stages, each, strict=True):
            used = stage.weight_bytes + RESERVED.total + users[-1] * one
            assert users[-1] == 0 or used <= available
    assert all(later <= earlier for earlier, later in pairwise(users))
    more = stage_memory(sizes, degrees, RESERVED, available + 4096)
    assert num_users(sizes, degrees, more, max(lengths), keeps_windows_apart=is_apart) >= users[-1]


@given(NAMES, DEGREES, st.integers(1, 5000))
def test_stages_and_ranks_hold_at_least_the_whole_kv(
    name: str, degrees: Degrees, num_tokens: int
) -> None:
    sizes = sizes_of(CONFIGS[name])
    (whole,) = sequence_bytes(sizes, Degrees(), num_tokens, keeps_windows_apart=True)
    each = sequence_bytes(sizes, degrees, num_tokens, keeps_windows_apart=True)
    assert degrees.tensor * sum(each) >= whole
    if degrees.tensor == 1:
        assert sum(each) == whole


def test_llama_8b_has_128_kib_a_token() -> None:
    sizes = sizes_of(LLAMA_8B)
    assert [(row.kind, row.token_bytes) for row in kv_rows(sizes)] == [("full", 128 << 10)]
    each = sequence_bytes(sizes, Degrees(), 17, keeps_windows_apart=False)
    assert each == (32 * (128 << 10),), "two blocks of 16 tokens"
    assert sequence_bytes(sizes, Degrees(16), 16, keeps_windows_apart=False) == (16 << 14,)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gemma3", {"window": 32, "full": None}),
        ("mistral", {"window": 32}),
        ("deepseek_v3", {"latent": None}),
    ],
)
def test_groups_are_those_of_the_layout(name: str, kinds: dict[str, Any]) -> None:
    rows = kv_rows(sizes_of(CONFIGS[name]))
    assert {row.kind: row.max_tokens for row in rows} == kinds
    layout = layout_of(parse_config(CONFIGS[name]))
    assert sum(row.token_bytes for row in rows) == layout.token_bytes
    assert len(rows) == len(groups_of(layout).all)


def test_windows_apart_end_the_growth_of_their_layers() -> None:
    sizes = sizes_of(CONFIGS["gemma3"])
    far = [
        sequence_bytes(sizes, Degrees(), length, keeps_windows_apart=True)[0]
        for length in (1024, 2048)
    ]
    in_blocks = sequence_bytes(sizes, Degrees(), 2048, keeps_windows_apart=False)[0]
    full = next(row for row in kv_rows(sizes) if row.kind == "full")
    assert far[1] - far[0] == 1024 * full.token_bytes
    assert in_blocks == 2048 * sizes.layout.token_bytes
