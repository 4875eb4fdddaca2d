"""The four challenges of long contexts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bench.long_context import (
    KV_TYPES,
    LAYOUTS,
    LENGTHS,
    PAGE,
    TIERS,
    Challenge,
    challenge,
    challenges,
    draw,
    paper_figures,
    return_s,
    sizes_of,
    tables_of,
)
from bench.suite.markdown import part_of
from engine.plan.devices import find_device

H200 = find_device("h200")


def cases(layout: str, kv_type: str = "bfloat16") -> list[Challenge]:
    return [challenge(H200, layout, kv_type, length) for length in LENGTHS.values()]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_longer_contexts_cost_more_of_everything(layout: str) -> None:
    for short, long in pairwise(cases(layout)):
        assert long.users <= short.users
        assert long.prefill_s > short.prefill_s
        assert long.step_ms > short.step_ms
        assert long.switch_s > short.switch_s


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_smaller_kv_lets_more_users_in_and_prefills_as_slowly(layout: str) -> None:
    by_type = {kv_type: challenge(H200, layout, kv_type, 50_000) for kv_type in KV_TYPES}
    assert by_type["bfloat16"].users < by_type["int8"].users < by_type["int4"].users
    assert by_type["fp8"].kv_bytes == by_type["int8"].kv_bytes
    assert len({case.prefill_s for case in by_type.values()}) == 1


def test_layouts_are_of_one_model_and_differ_in_their_kv() -> None:
    sizes = {name: sizes_of(raw, "bfloat16") for name, raw in LAYOUTS.items()}
    billions = {name: model.num_parameters / 1e9 for name, model in sizes.items()}
    assert all(7.5 < number < 9.0 for number in billions.values()), billions
    token = {name: model.layout.token_bytes for name, model in sizes.items()}
    assert token["MHA"] == 4 * token["GQA"] == 32 * token["MQA"]
    assert token["latent"] == 32 * 576 * 2
    far = {name: cases(name)[-1].kv_bytes for name in LAYOUTS}
    assert far["MQA"] < far["windowed"] < far["latent"] < far["GQA"]


def test_tiers_pay_more_the_longer_the_context() -> None:
    for layout in LAYOUTS:
        for tier in TIERS:
            gains = [case.prefill_s / return_s(case, tier) for case in cases(layout)]
            assert gains[-1] > max(1, gains[0])
    short = challenge(H200, "MHA", "bfloat16", 4096)
    # A slow tier does not pay everywhere.
    assert return_s(short, "disk") > short.prefill_s > return_s(short, "host memory")


def test_the_papers_figures_are_reproduced() -> None:
    found = {(figure.what, figure.length): figure for figure in paper_figures()}
    for (what, _), figure in found.items():
        if what != "users":
            assert figure.computed == pytest.approx(float(figure.printed), rel=0.02)
    assert found["users", "50K"].computed == 1
    assert found["users", "4K"].computed == pytest.approx(20, rel=0.1)


@pytest.mark.slow
def test_the_page_has_the_tables_of_its_command() -> None:
    names = ("h200", "b200", "h100", "a100", "l40s")
    parts = tables_of(list(challenges([find_device(name) for name in names])))
    for name, body in parts.items():
        assert part_of(PAGE.read_text(), name).strip() == body.strip(), (
            "run python -m bench.long_context --write"
        )


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(list(challenges([H200, find_device("l4")])), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
