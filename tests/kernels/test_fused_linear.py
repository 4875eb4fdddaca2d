"""The linears of GPUs, on the CPU: what they add, and that quantised weights get there."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.linear import FusedLinear
from baton_kernels.quantized_linear import IntLinear, pack_int_weight


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float64])
def test_fused_linear(has_bias: bool, has_residual: bool, out_dtype: torch.dtype | None) -> None:
    x, weight = randn(3, 7), randn(5, 7, seed=1)
    bias = randn(5, seed=2) if has_bias else None
    residual = randn(3, 5, seed=3) if has_residual else None
    wanted = x @ weight.t()
    for extra in (bias, residual):
        wanted = wanted if extra is None else wanted + extra
    got = FusedLinear(weight, bias)(x, residual, out_dtype)
    assert got.dtype == (out_dtype or x.dtype)
    torch.testing.assert_close(got, wanted.to(got.dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_int_linear_as_a_layer(bits: int) -> None:
    levels = torch.randint(0, 1 << bits, (5, 64), generator=torch.Generator().manual_seed(0))
    scales = randn(5, 2).abs()
    weight = pack_int_weight(levels.to(torch.uint8), scales, None, bits)
    layer = IntLinear(weight, randn(5, seed=1))
    assert (layer.num_in, layer.num_out) == (64, 5)
    x, residual = randn(3, 64, seed=2), randn(3, 5, seed=3)
    wide = (levels.view(5, 2, 32) - (1 << (bits - 1))) * scales[..., None]
    wanted = x @ wide.view(5, 64).t() + randn(5, seed=1) + residual
    torch.testing.assert_close(layer(x, residual), wanted, rtol=1e-4, atol=1e-3)
