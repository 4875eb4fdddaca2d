"""Specs of ranks for tests without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.families.read import read_config
from engine.ranks.mesh import Degrees
from engine.ranks.rank_spec import RankSpec

BOX = Path(__file__).parents[2] / "models" / "baton-py-6m"


def rank_spec(degrees: Degrees, backend: str, **more: Any) -> RankSpec:
    """Rank 0's, of the bundled model. more: other fields."""
    fields = {
        "folder": str(BOX),
        "config": read_config(BOX),
        "dtype": "float32",
        "pools": (),
        "num_threads": 1,
        "staging_bytes": 1 << 20,
    }
    return RankSpec(0, degrees, backend, **(fields | more))
