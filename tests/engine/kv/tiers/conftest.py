"""Engines with blocks of known KV."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kv.prefix_index import BlockIdentity
from engine.oracle import OracleEngine, OracleOptions

IDENTITY = BlockIdentity(b"k" * 32, b"p" * 32, np.arange(4, dtype=np.uint32).tobytes(), b"t" * 16)


@pytest.fixture
def engine() -> OracleEngine:
    """Of 8 blocks of 4 tokens, each with KV of its own."""
    engine = OracleEngine(OracleOptions(num_blocks=8, block_size=4))
    rng = np.random.default_rng(1)
    data = engine.kv.data  # type: ignore[union-attr]
    data[:] = rng.integers(-(2**62), 2**62, data.shape)
    return engine
