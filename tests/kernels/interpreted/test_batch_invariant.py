"""With --batch-invariant a row of a linear layer on a GPU's kernels has the same bits whatever is
computed with it. test_batch_invariant_engine.py shows it of a whole engine."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.fixed_linear import fixed_linear as fixed_linear_op
from baton_kernels.gpu.fixed_linear import fixed_linear


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_rest", [False, True])
def test_rows_of_a_linear_layer(dtype: torch.dtype, has_rest: bool) -> None:
    x, weight = randn(90, 150).to(dtype), randn(140, 150, seed=1).to(dtype)
    bias = randn(140, seed=2).to(dtype) if has_rest else None
    residual = randn(90, 140, seed=3).to(dtype) if has_rest else None
    whole = fixed_linear(x, weight, bias, residual, torch.float32)
    wanted = fixed_linear_op.twin(x, weight, bias, residual, torch.float32)
    torch.testing.assert_close(whole, wanted, atol=1e-3, rtol=1e-3)
    for rows in (slice(0, 1), slice(89, 90), slice(13, 30), slice(5, 70)):
        own = None if residual is None else residual[rows]
        got = fixed_linear(x[rows], weight, bias, own, torch.float32)
        assert torch.equal(got, whole[rows])
