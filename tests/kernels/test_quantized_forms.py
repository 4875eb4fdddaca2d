"""Which quantised weights run as they are stored, and on what: decided by device, type and compute
capability alone."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from baton_kernels.linear import keeps_float8, keeps_levels, pack_float8
from baton_kernels.quantize_rows import dequantize_rows, quantize_rows

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
#: Without Triton nothing is kept on a GPU.
HAS_TRITON = find_spec("triton") is not None


@pytest.mark.parametrize(
    ("capability", "dtype", "is_kept"),
    [
        ((8, 6), torch.bfloat16, False),
        ((8, 9), torch.bfloat16, True),
        ((9, 0), torch.float16, True),
        ((10, 0), torch.bfloat16, True),
        ((9, 0), torch.float32, False),
    ],
)
def test_float8_stays_where_it_is_multiplied(
    capability: tuple[int, int],
    dtype: torch.dtype,
    is_kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for group_size in (4096, 128):
        assert keeps_float8(CUDA, dtype, 4096, group_size) == (is_kept and HAS_TRITON)
        assert not keeps_float8(CPU, dtype, 4096, group_size)
    # Groups that a step of the kernel does not take, or that are not all of one size.
    assert not keeps_float8(CUDA, dtype, 4096, 96)
    assert not keeps_float8(CUDA, dtype, 4096 + 64, 128)


@pytest.mark.parametrize(
    ("bits", "group_size", "is_kept"),
    [(4, 128, True), (4, 32, True), (8, 4096, True), (8, 16, False), (3, 128, False)],
)
def test_integers_stay_on_any_gpu(bits: int, group_size: int, is_kept: bool) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert keeps_levels(CUDA, dtype, bits, group_size) == (is_kept and HAS_TRITON)
    assert not keeps_levels(CUDA, torch.float32, bits, group_size)


@pytest.mark.parametrize("has_bias", [False, True])
def test_float8_as_a_layer(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    codes, scales = quantize_rows(torch.randn(5, 64, generator=generator), torch.float8_e4m3fn)
    x, residual = (torch.randn(3, n, generator=generator) for n in (64, 5))
    bias = torch.randn(5, generator=generator) if has_bias else None
    layer = pack_float8(codes, scales[:, None], bias, CPU)
    assert (layer.num_in, layer.num_out) == (64, 5)
    rounded = dequantize_rows(*quantize_rows(x, torch.float8_e4m3fn), torch.float32)
    wanted = rounded @ dequantize_rows(codes, scales, torch.float32).t() + residual
    wanted = wanted if bias is None else wanted + bias
    torch.testing.assert_close(layer(x, residual), wanted, rtol=1e-4, atol=1e-4)
