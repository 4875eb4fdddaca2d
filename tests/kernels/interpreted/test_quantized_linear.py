"""Linears with quantised weights, and the quantisation of rows, against their twins."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import quantized_linear as twins
from baton_kernels.gpu import quantized_linear as kernels
from baton_kernels.gpu.quantize_rows import quantize_rows
from baton_kernels.quantize_rows import quantize_rows as quantize_rows_twin

SHAPES = [(1, 5, 32), (3, 40, 96), (17, 33, 160)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(*shape: int, low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("shape", [(1, 3), (4, 130), (2, 2, 2500)])
def test_quantize_rows(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    x[0] = 0
    got, got_scales = quantize_rows(x, torch.int8)
    wanted, scales = quantize_rows_twin(x, torch.int8)
    torch.testing.assert_close(got_scales, scales)
    assert (got.int() - wanted.int()).abs().max() <= 1
    assert (got != wanted).float().mean() < 0.01


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [8, 32, None])
@pytest.mark.parametrize(("rows", "num_out", "num_in"), SHAPES)
def test_int_linear(
    rows: int, num_out: int, num_in: int, group_size: int | None, bits: int
) -> None:
    """group_size None: one group, not a multiple of a run."""
    x = randn(rows, num_in).half()
    size = group_size or num_in
    levels = codes(num_out, num_in, low=0, high=1 << bits).to(torch.uint8)
    shape = (num_out, num_in // size)
    scales = randn(*shape, seed=2) * 0.2 / (1 << bits)
    zeros = codes(*shape, low=0, high=(1 << bits) + 2).float()
    bias, residual = randn(num_out, seed=3).half(), randn(rows, num_out, seed=4).half()
    for offsets in (zeros, None):
        weight = twins.pack_int_weight(levels, scales, offsets, bits)
        assert (weight.num_out, weight.num_in) == (num_out, num_in)
        middle = torch.full(shape, float(1 << (bits - 1))) if offsets is None else offsets
        wide = (levels.view(num_out, -1, size) - middle[..., None]) * scales[..., None]
        torch.testing.assert_close(twins.dequantize(weight), wide.view(num_out, num_in))
        for extra in ((), (bias,), (None, residual), (bias, residual, torch.float32)):
            got = kernels.int_linear(x, weight, *extra)
            assert_close(got, twins.int_linear(x, weight, *extra))


def test_what_cannot_be_packed_is_refused() -> None:
    levels, scales = torch.zeros(2, 6, dtype=torch.uint8), torch.ones(2, 2)
    with pytest.raises(ValueError, match="halved"):
        twins.pack_int_weight(levels, scales, None, 4)
    with pytest.raises(ValueError, match="whole"):
        twins.pack_int_weight(levels, scales, scales * 0.5, 8)
    with pytest.raises(ValueError, match="bits"):
        twins.pack_int_weight(levels, scales, None, 3)


def test_fp8_linear() -> None:
    """Of numbers that float8 holds exactly: the interpreter's own rounding to float8 is wrong where
    it carries."""
    x = codes(3, 96, low=-8, high=9).float()
    x[:, 0] = 448.0
    weight = codes(40, 96, low=-8, high=9).float().to(torch.float8_e4m3fn)
    args = (x, weight, randn(40, seed=2))
    assert_close(kernels.fp8_linear(*args), twins.fp8_linear(*args))
    torch.testing.assert_close(
        twins.fp8_linear(*args), (x @ weight.float().t()) * args[2], rtol=1e-5, atol=1e-3
    )
