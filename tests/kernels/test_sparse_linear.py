"""2:4 sparse layers. The compressed form needs a GPU: here a double stands for torch's
compression."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import linear
from baton_kernels.linear import FusedLinear, pack_linear
from baton_kernels.sparse_linear import SparseLinear, can_run_sparse, is_sparse
from bench.quantized_checkpoints import prune

CUDA = torch.device("cuda")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_two_largest_of_four_stay() -> None:
    weight = randn(7, 24)
    pruned = prune(weight)
    fours, kept = weight.view(7, 6, 4), pruned.view(7, 6, 4)
    assert ((kept == fours) | (kept == 0)).all()
    assert ((kept != 0).sum(-1) == 2).all()
    least_kept = torch.where(kept != 0, kept.abs(), torch.inf).amin(-1)
    most_dropped = torch.where(kept == 0, fours.abs(), 0).amax(-1)
    assert (least_kept >= most_dropped).all()
    assert torch.equal(prune(torch.ones(1, 4)), torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
    with pytest.raises(ValueError, match="multiple of 4"):
        prune(torch.ones(2, 6))


def test_one_weight_too_many_is_not_sparse() -> None:
    weight = prune(randn(32, 64))
    assert is_sparse(weight)
    assert is_sparse(torch.zeros(32, 64))
    weight[5, 8:12] = torch.tensor([1.0, 0.0, 2.0, 3.0])
    assert not is_sparse(weight)


@pytest.mark.parametrize(
    ("capability", "dtype", "shape", "is_possible"),
    [
        ((8, 0), torch.bfloat16, (32, 64), True),
        ((9, 0), torch.float16, (4096, 14336), True),
        ((7, 5), torch.float16, (32, 64), False),
        ((8, 0), torch.float32, (32, 64), False),
        ((8, 0), torch.bfloat16, (48, 64), False),
        ((8, 0), torch.bfloat16, (32, 96), False),
    ],
)
def test_where_it_runs(
    capability: tuple[int, int],
    dtype: torch.dtype,
    shape: tuple[int, int],
    is_possible: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert can_run_sparse(CUDA, dtype, torch.Size(shape)) == is_possible
    assert not can_run_sparse(torch.device("cpu"), dtype, torch.Size(shape))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_as_a_layer(has_bias: bool, has_residual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed = []
    monkeypatch.setattr(
        torch.sparse, "to_sparse_semi_structured", lambda x: compressed.append(x) or x
    )
    weight, x = prune(randn(32, 64)), randn(3, 64, seed=1)
    bias = randn(32, seed=2) if has_bias else None
    residual = randn(3, 32, seed=3) if has_residual else None
    wanted = x @ weight.t()
    for extra in (bias, residual):
        wanted = wanted if extra is None else wanted + extra
    layer = SparseLinear(weight, bias)
    assert compressed == [weight]
    assert (layer.num_in, layer.num_out) == (64, 32)
    got = layer(x, residual, torch.float64)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got.float(), wanted)


def test_only_sparse_weights_are_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, which is no CPU, with the answers of a GPU."""
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda x: x)
    monkeypatch.setattr(linear, "can_run_sparse", lambda *_: True)
    weight = torch.empty(32, 64, device="meta")
    for answer, form in ((True, SparseLinear), (False, FusedLinear)):
        monkeypatch.setattr(linear, "is_sparse", lambda _, answer=answer: answer)
        assert isinstance(pack_linear(weight, None), form)
    monkeypatch.setattr(linear, "can_run_sparse", lambda *_: False)
    monkeypatch.setattr(linear, "is_sparse", lambda _: True)
    assert isinstance(pack_linear(weight, None), FusedLinear)
