"""All adapters at once add to each row what its own adapter adds by itself, and the memory that
they take beside is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_kernels import linear
from engine.families.read import read_config
from engine.torch.adapters import Adapter, LowRank, load_adapter
from engine.torch.grouped_adapters import (
    GroupedAdapters,
    GroupedLowRank,
    group_adapters,
    padded_bytes,
)
from tests.support.adapters import ATTENTION, MLP, make_adapter
from tests.support.tiny_models import make_tiny_model

CPU = torch.device("cpu")
Load = Callable[..., Adapter]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads an adapter with plain weights, as a GPU has them."""
    monkeypatch.setattr(linear, "can_pack", lambda _: False)

    def make(name: str, *, model: str = "llama", **settings: Any) -> Adapter:
        source = tmp_path / model
        if not source.exists():
            make_tiny_model(source, model)
        folder = make_adapter(tmp_path / name, source, seed=len(name), **settings)
        return load_adapter(folder, read_config(source), torch.float32, CPU, 64)

    return make


def grouped(adapters: dict[str, Adapter]) -> GroupedAdapters:
    found = group_adapters(adapters)
    assert found is not None
    return found


def test_each_row_gets_what_its_adapter_adds(load: Load) -> None:
    """Ranks differ, and one adapter changes fewer layers than the other."""
    adapters = {
        "red": load("red", rank=20, targets=("q_proj", "down_proj")),
        "blue": load("blue", rank=4, targets=ATTENTION + MLP),
    }
    owners = ["blue", "", "red", "red", "blue"]
    (rows,) = grouped(adapters).rows(owners, owners, CPU)
    generator = torch.Generator().manual_seed(1)
    num_added = 0
    for at, layer in enumerate(rows.layers):
        for position, low in enumerate(layer.linears):
            assert isinstance(low, GroupedLowRank)
            x = torch.randn(len(owners), low.down.num_in, generator=generator)
            before = torch.randn(len(owners), low.up.num_out, generator=generator)
            got, wanted = before.clone(), before.clone()
            low.add_to(got, x, rows.rows)
            for row, name in enumerate(owners):
                own = adapters[name].layers[at].linears[position] if name else None
                if isinstance(own, LowRank):
                    own.add_to(wanted, x, torch.tensor([row]))
                    num_added += 1
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
            assert got[1].equal(before[1])
    # Two rows with an adapter of all four layers, and two with one of two.
    assert num_added == len(rows.layers) * (2 * 4 + 2 * 2)


def test_what_kernels_cannot_read_is_not_grouped(load: Load) -> None:
    red = load("red")
    assert group_adapters({}) is None
    assert group_adapters({"red": red}) is not None
    layer = red.layers[0]
    low = layer.attention.output
    assert low is not None
    with_bias = linear.PlainLinear(torch.zeros(8, 8), torch.zeros(8))
    odd = replace(layer, attention=replace(layer.attention, output=replace(low, up=with_bias)))
    assert group_adapters({"red": replace(red, layers=(odd, *red.layers[1:]))}) is None


@pytest.mark.parametrize(
    ("model", "targets", "is_grouped"),
    [
        ("qwen3_moe", ATTENTION, True),
        ("qwen3_moe", ("down_proj",), False),
        ("deepseek_v3", ("o_proj",), True),
        ("deepseek_v3", ("kv_b_proj",), False),
    ],
)
def test_what_changes_experts_or_heads_is_not_grouped(
    load: Load, model: str, targets: tuple[str, ...], is_grouped: bool
) -> None:
    """Grouped kernels would leave it out."""
    red = load("red", model=model, targets=targets)
    assert (group_adapters({"red": red}) is not None) is is_grouped


def test_copies_of_smaller_weights_are_counted(load: Load) -> None:
    red, blue = load("red", rank=48), load("blue", rank=16)
    assert padded_bytes({"red": red}, 4) == 0
    assert padded_bytes({"red": red, "other": red}, 4) == 0
    # Each layer of the smaller one grows to the larger one's rank, three times its own.
    assert padded_bytes({"red": red, "blue": blue}, 4) == 3 * blue.num_bytes
    # A rank of 8 grows to 16 in any company.
    small = load("small", rank=8, targets=("o_proj",))
    assert padded_bytes({"small": small}, 4) == 2 * small.num_bytes
    ends = load("green", rank=16, targets=("embed_tokens",))
    assert ends.embeddings is not None
    table, up = ends.embeddings.down, ends.embeddings.up
    expected = 2 * table.nbytes + 4 * up.num_out * up.num_in
    assert padded_bytes({"red": red, "green": ends}, 4) == expected
