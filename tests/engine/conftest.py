"""Tiny checkpoints, made once per set of settings, and engines over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.torch.engine import TorchEngine
from tests.support.engines import load_engine
from tests.support.tiny_models import Family, make_tiny_model

MakeModel = Callable[..., Path]
MakeEngine = Callable[..., TorchEngine]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    made: dict[str, Path] = {}

    def make(family: Family = "llama", **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items(), key=str)))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_engine(tiny_model: MakeModel) -> MakeEngine:
    """An engine over tiny_model(family, **overrides); not shared."""

    def make(
        family: Family = "llama",
        block_size: int = 8,
        num_blocks: int = 64,
        layer_group_size: int = 4,
        kv_cache_dtype: str = "auto",
        **overrides: Any,
    ) -> TorchEngine:
        return load_engine(
            str(tiny_model(family, **overrides)),
            block_size=block_size,
            num_blocks=num_blocks,
            layer_group_size=layer_group_size,
            kv_cache_dtype=kv_cache_dtype,
        )

    return make
