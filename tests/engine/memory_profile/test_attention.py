"""Eager and paged attention of one prompt."""

from __future__ import annotations

import pytest
import torch

from engine.memory_profile.attention import (
    AttentionShape,
    Prompt,
    eager,
    eager_bytes,
    paged,
    record_attention,
)
from engine.memory_profile.recorder import ResidentRecorder, peak_bytes

SHAPE = AttentionShape(4, 2, 16, torch.float32, torch.device("cpu"), chunk=24)


@pytest.mark.parametrize("num_tokens", [1, 16, 61])
def test_both_compute_the_same(num_tokens: int) -> None:
    prompt = Prompt(SHAPE, num_tokens)
    torch.testing.assert_close(paged(prompt), eager(prompt), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_eager_attention_takes_the_memory_of_its_scores() -> None:
    free = 1 << 32
    runs = {
        kind: record_attention(SHAPE, kind, 1500, free, ResidentRecorder())
        for kind in ("eager", "paged")
    }
    peak = peak_bytes(runs["eager"].points)
    assert eager_bytes(SHAPE, 1500) / 2 < peak < 2 * eager_bytes(SHAPE, 1500)
    assert peak_bytes(runs["paged"].points) < peak / 4
    assert record_attention(SHAPE, "eager", 1500, 1000, ResidentRecorder()).points == ()
