"""Linears with quantised weights, and the quantisation of rows, against their twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton_kernels import quantized_linear as twins
from baton_kernels.gpu import block_scaled_mm
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


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "splits"), [(3, 4), (40, 4), (70, 1)])
def test_int_linear_with_its_inputs_split(rows: int, splits: int, bits: int) -> None:
    """17 runs in four parts, the last of two; a row is the same alone and among others of its
    tile."""
    num_out, num_in = 40, 17 * 32
    assert kernels.num_splits(rows, num_out, num_in // 32) == splits
    x = randn(rows, num_in).half()
    levels = codes(num_out, num_in, low=0, high=1 << bits).to(torch.uint8)
    scales = randn(num_out, num_in // 32, seed=2) * 0.2 / (1 << bits)
    weight = twins.pack_int_weight(levels, scales, None, bits)
    bias, residual = randn(num_out, seed=3).half(), randn(rows, num_out, seed=4).half()
    for extra in ((), (bias, residual, torch.float32)):
        got = kernels.int_linear(x, weight, *extra)
        assert_close(got, twins.int_linear(x, weight, *extra))
    assert torch.equal(kernels.int_linear(x[1:3], weight)[0], kernels.int_linear(x[:3], weight)[1])


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64])
def test_layers_with_many_outputs_or_few_inputs_are_not_split(num_rows: int) -> None:
    assert kernels.num_splits(num_rows, 4096, 32) == 4
    assert kernels.num_splits(num_rows, 28672, 32) == 1
    assert kernels.num_splits(num_rows, 128256, 1000) == 1
    assert kernels.num_splits(num_rows, 40, 7) == 1


def test_what_cannot_be_packed_is_refused() -> None:
    levels, scales = torch.zeros(2, 6, dtype=torch.uint8), torch.ones(2, 2)
    with pytest.raises(ValueError, match="halved"):
        twins.pack_int_weight(levels, scales, None, 4)
    with pytest.raises(ValueError, match="whole"):
        twins.pack_int_weight(levels, scales, scales * 0.5, 8)
    with pytest.raises(ValueError, match="bits"):
        twins.pack_int_weight(levels, scales, None, 3)


def float8_case(
    rows: int, num_groups: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, codes and scales of numbers that float8 holds exactly, because the interpreter's own
    rounding to float8 is wrong where it carries, and the product."""
    num_in, num_out = num_groups * group_size, 40
    x = codes(rows, num_in, low=-8, high=9).float()
    # Each run of a row has a scale of its own, a power of two.
    x.view(rows, num_groups, -1)[..., 0] = 448.0
    x *= (2.0 ** (torch.arange(num_groups) % 3)).repeat_interleave(group_size)
    weight = codes(num_out, num_in, low=-8, high=9).float().to(torch.float8_e4m3fn)
    scales = randn(num_groups, num_out, seed=2)
    dense = weight.float() * scales.t().repeat_interleave(group_size, 1)
    return x, weight, scales, x @ dense.t()


@pytest.mark.parametrize("rows", [3, 17, 65])
@pytest.mark.parametrize(
    ("num_groups", "group_size"), [(1, 96), (3, 32), (2, 128), (1, 1056), (18, 32)]
)
def test_fp8_linear(rows: int, num_groups: int, group_size: int) -> None:
    *args, wanted = float8_case(rows, num_groups, group_size)
    bias, residual = randn(40, seed=3), randn(rows, 40, seed=4)
    torch.testing.assert_close(twins.fp8_linear(*args), wanted, rtol=1e-5, atol=1e-1)
    for extra in ((), (bias, residual)):
        got = kernels.fp8_linear(*args, *extra)
        torch.testing.assert_close(got, twins.fp8_linear(*args, *extra), rtol=1e-5, atol=1e-1)


@pytest.mark.parametrize("rows", [16, 17])
def test_many_rows_of_float8_are_torchs_own_product_where_it_has_one(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's is run here by the CPU, which has it, too."""
    calls = []
    own = torch._scaled_mm

    def scaled_mm(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(len(args[0]))
        return own(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(kernels, "has_scaled_mm", lambda _: True)
    x, weight, scales, _ = float8_case(rows, 1, 96)
    weight, scales = weight[:32].contiguous(), scales[:, :32].contiguous()
    bias, residual = (randn(*shape).bfloat16() for shape in ((32,), (rows, 32)))
    args = x.bfloat16(), weight, scales, bias, residual
    if rows > 16:
        torch.testing.assert_close(
            kernels.fp8_linear(*args), twins.fp8_linear(*args), rtol=2e-2, atol=4.0
        )
    # torch's product takes no float32 results, groups, or sizes that are not multiples of 16.
    kernels.fp8_linear(x, weight, scales)
    kernels.fp8_linear(x.bfloat16(), weight[:31], scales[:, :31].contiguous())
    kernels.fp8_linear(x.bfloat16(), weight, scales, None, None, torch.float32)
    kernels.fp8_linear(x.bfloat16(), weight, scales.repeat(3, 1))
    assert calls == ([rows] if rows > 16 else [])


def by_definition(
    x: torch.Tensor, weight: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, **_: Any
) -> torch.Tensor:
    """torch's product with scales of 128 inputs, as its interface has it: scales of neighbouring
    rows and outputs lie side by side."""
    if scale_a.stride(0) != 1 or scale_b.stride(1) != 1:
        raise RuntimeError("scales lie otherwise")
    wide = x.float() * scale_a.repeat_interleave(128, 1)
    return (wide @ (weight.float() * scale_b.repeat_interleave(128, 0))).bfloat16()


def test_prompts_of_float8_in_blocks_are_torchs_own_product_where_it_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def scaled_mm(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(len(x))
        return by_definition(x, weight, **options)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(kernels, "has_block_scaled_mm", lambda _: True)
    x, weight, scales, _ = float8_case(68, 2, 128)
    weight, scales = weight[:32].contiguous(), scales[:, :32].contiguous()
    bias, residual = randn(32).bfloat16(), randn(68, 32).bfloat16()
    args = x.bfloat16(), weight, scales, bias, residual
    torch.testing.assert_close(
        kernels.fp8_linear(*args), twins.fp8_linear(*args), rtol=2e-2, atol=4.0
    )
    assert calls == [68]
    # Few rows, rows that are no multiple of 4, other results and other groups are our kernel's.
    for rows in (64, 67):
        kernels.fp8_linear(x[:rows].bfloat16(), weight, scales)
    kernels.fp8_linear(x, weight, scales)
    kernels.fp8_linear(x.bfloat16(), weight, scales.repeat(2, 1))
    assert calls == [68]


def test_torchs_product_in_blocks_is_tried_before_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch, "_scaled_mm", by_definition)
    assert block_scaled_mm.is_right(cpu)

    def transposed(x: torch.Tensor, weight: torch.Tensor, **scales: Any) -> torch.Tensor:
        scales["scale_a"] = scales["scale_a"].flip(1).t().contiguous().t()
        return by_definition(x, weight, **scales)

    def missing(*_: torch.Tensor, **__: Any) -> torch.Tensor:
        raise RuntimeError("no such product in this build")

    for wrong in (transposed, missing):
        monkeypatch.setattr(torch, "_scaled_mm", wrong)
        assert not block_scaled_mm.is_right(cpu)
    assert not block_scaled_mm.has_block_scaled_mm(cpu)
