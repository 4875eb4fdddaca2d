"""KV that travels as it is costs nothing; fewer bits cost something, and little."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.kv_quality import Caches, Handoffs, measure, table_of
from tests.support.tiny_models import make_tiny_model


@pytest.mark.slow
def test_the_quality_of_each_type(tmp_path: Path) -> None:
    rng = random.Random(0)
    windows = [[rng.randrange(64) for _ in range(40)] for _ in range(2)]
    model = str(make_tiny_model(tmp_path, "llama"))
    dtypes = ("float32", "bfloat16", "int8", "fp8")
    check(Handoffs(model, "float32", 40), windows, dtypes, "travels")
    check(Caches(model, "float32", 40, dtypes), windows, dtypes, "is kept")


def check(
    subject: Handoffs | Caches, windows: list[list[int]], dtypes: tuple[str, ...], what: str
) -> None:
    exact, half, int8, fp8 = measure(subject, windows, dtypes, "float32")
    assert (exact.max_error, exact.divergence, exact.same_top) == (0.0, 0.0, 1.0)
    assert exact.bytes_share == 2.0
    assert 0 < half.mean_error < fp8.mean_error
    assert 0 < int8.mean_error < fp8.mean_error
    assert 0 < half.divergence < int8.divergence < fp8.divergence
    for scaled in (int8, fp8):
        assert 0.5 < scaled.bytes_share < 0.7
        assert scaled.max_error >= scaled.mean_error
    assert len(table_of([exact, half, int8, fp8], what).splitlines()) == 6
