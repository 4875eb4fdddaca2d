"""Native linear layers: right to rounding, and a row's result depends on that row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_kernels.cpu.linear import NativeLinear, can_pack
from baton_kernels.linear import (
    OneDnnLinear,
    PlainLinear,
    onednn_has_bfloat16,
    pack_linear,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def randn(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.sampled_from([1, 2, 5, 6, 7, 13, 48, 49, 100]),
    num_out=st.integers(1, 200),
    half_in=st.integers(1, 80),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    is_wide=st.booleans(),
)
def test_against_float64(
    dtype: torch.dtype,
    num_rows: int,
    num_out: int,
    half_in: int,
    has_bias: bool,
    has_residual: bool,
    is_wide: bool,
) -> None:
    weight = randn(1, dtype, num_out, 2 * half_in)
    bias = randn(2, dtype, num_out) if has_bias else None
    x = randn(3, dtype, num_rows, 2 * half_in)
    residual = randn(4, dtype, num_rows, num_out) if has_residual else None
    wanted = x.double() @ weight.double().T
    wanted += 0 if bias is None else bias.double()
    wanted += 0 if residual is None else residual.double()
    out_dtype = torch.float32 if is_wide else None
    got = NativeLinear(weight, bias)(x, residual, out_dtype)
    assert got.dtype == (out_dtype or dtype)
    assert relative_error(got, wanted) < (1e-5 if is_wide else TOLERANCE[dtype])


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_to_the_bit_in_every_batch(dtype: torch.dtype) -> None:
    linear = NativeLinear(randn(1, dtype, 130, 4200), None)
    x = randn(2, dtype, 101, 4200)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
    # Up to 13 rows: every split of a step's rows into register tiles.
    for num_rows in (*range(2, 14), 47, 101):
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])
        assert torch.equal(linear(x[-num_rows:]), alone[-num_rows:])


NEEDS_ONEDNN = pytest.mark.skipif(
    not onednn_has_bfloat16(), reason="oneDNN has no bfloat16 on this CPU"
)


@pytest.mark.parametrize(
    "form", [PlainLinear, pytest.param(OneDnnLinear, marks=NEEDS_ONEDNN), NativeLinear]
)
def test_all_forms_agree(form: type[PlainLinear | OneDnnLinear | NativeLinear]) -> None:
    weight, bias = randn(1, torch.bfloat16, 70, 32), randn(2, torch.bfloat16, 70)
    x, residual = randn(3, torch.bfloat16, 3, 32), randn(4, torch.bfloat16, 3, 70)
    layer = form(weight, bias)
    assert (layer.num_out, layer.num_in) == (70, 32)
    wanted = x.double() @ weight.double().T + bias.double() + residual.double()
    assert relative_error(layer(x, residual), wanted) < 1e-2
    assert layer(x, None, torch.float32).dtype == torch.float32


def test_no_rows() -> None:
    linear = NativeLinear(randn(1, torch.bfloat16, 70, 32), None)
    assert linear(torch.empty(0, 32, dtype=torch.bfloat16)).shape == (0, 70)


def test_what_is_chosen() -> None:
    assert isinstance(pack_linear(randn(1, torch.bfloat16, 8, 8), None), NativeLinear)
    assert isinstance(pack_linear(randn(1, torch.float16, 8, 8), None), NativeLinear)
    assert not can_pack(randn(1, torch.bfloat16, 8, 7))


def test_what_is_chosen_for_a_shape_that_the_kernels_do_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On this CPU, and on one on which oneDNN takes no bfloat16, as below AVX-512."""
    weight = randn(1, torch.bfloat16, 8, 7)
    wanted = OneDnnLinear if onednn_has_bfloat16() else PlainLinear
    assert isinstance(pack_linear(weight, None), wanted)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert isinstance(pack_linear(weight, None), PlainLinear)
