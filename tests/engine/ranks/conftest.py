"""Engines of several ranks over tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.ranks import start
from engine.ranks.team import RankTeam
from engine.torch.engine import TorchEngine
from tests.support.engines import load_engine
from tests.support.rank_threads import start_thread

LoadRanks = Callable[..., TorchEngine]


@pytest.fixture
def losses() -> list[str]:
    """Why engines of `load_ranks` could not go on."""
    return []


@pytest.fixture
def load_ranks(losses: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadRanks]:
    """Loads an engine of so many ranks, the others being threads of this process."""
    team = partial(RankTeam, start=start_thread, on_loss=losses.append)
    monkeypatch.setattr(start, "RankTeam", team)
    with ExitStack() as stack:

        def load(model: Path, size: int, **options: Any) -> TorchEngine:
            options = {"num_blocks": 64, "block_size": 8, **options}
            engine = load_engine(
                str(model),
                tensor_parallel_size=size,
                on_plan=lambda _: None,
                progress=lambda _: None,
                **options,
            )
            stack.callback(engine.close)
            return engine

        yield load
