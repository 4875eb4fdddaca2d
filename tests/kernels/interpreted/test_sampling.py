"""The sampling kernels against their twins: the same tokens."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import sampling as twins
from baton_kernels.gpu import sampling as kernels
from baton_kernels.gpu import token_filter

SPREAD = torch.tensor([0.01, 1.0, 5.0, 30.0])[:, None]


def make_logits(vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Flat to steep rows; some tokens already filtered, some equal, zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocab_size, generator=generator) * SPREAD
    logits[:, ::7] = float("-inf")
    logits[:, 1::5] = logits[:, 1:2]
    logits[1, 2::9] = 0.0
    logits[1, 3::9] = -0.0
    return logits


def make_keys(num_rows: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (num_rows, 2), generator=generator).to(torch.int32)


@pytest.mark.parametrize("vocab_size", [1, 31, 5000])
def test_gumbel_argmax(vocab_size: int) -> None:
    logits = make_logits(vocab_size)
    logits[:, 0] = 0.0
    for seed in range(5):
        keys = make_keys(4, seed)
        assert torch.equal(kernels.gumbel_argmax(logits, keys), twins.gumbel_argmax(logits, keys))


def test_noise_of_very_likely_and_very_unlikely_numbers() -> None:
    """Over many ids the hash comes near both ends of (0, 1): with equal logits the noise alone
    decides."""
    logits = torch.zeros(3, 100_000)
    keys = make_keys(3)
    assert torch.equal(kernels.gumbel_argmax(logits, keys), twins.gumbel_argmax(logits, keys))


@pytest.mark.parametrize("vocab_size", [5, 300])
def test_keep_top_k(vocab_size: int) -> None:
    for top_k in ([1, 2, 3, 4], [vocab_size] * 4, [max(1, vocab_size // 2)] * 4):
        got, wanted = make_logits(vocab_size), make_logits(vocab_size)
        kernels.keep_top_k(got, torch.tensor(top_k))
        twins.keep_top_k(wanted, torch.tensor(top_k))
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("vocab_size", [5, 300])
def test_keep_top_p(vocab_size: int) -> None:
    for top_p in (1e-6, 0.77, 0.999):
        got, wanted = make_logits(vocab_size), make_logits(vocab_size)
        kernels.keep_top_p(got, torch.full((4,), top_p))
        twins.keep_top_p(wanted, torch.full((4,), top_p))
        assert torch.equal(got, wanted)


def test_rows_of_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens at the threshold lie in all of them."""
    monkeypatch.setattr(token_filter, "PART", 64)
    monkeypatch.setattr(token_filter, "CHUNK", 16)
    got, wanted = make_logits(130), make_logits(130)
    kernels.keep_top_p(got, torch.full((4,), 0.6))
    twins.keep_top_p(wanted, torch.full((4,), 0.6))
    assert torch.equal(got, wanted)
    top_k = torch.tensor([5, 60, 100, 128])
    kernels.keep_top_k(got, top_k)
    twins.keep_top_k(wanted, top_k)
    assert torch.equal(got, wanted)
