"""Native int8 and int4 layers: exact but for the rounding of their inputs, and independent of the
batch."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.cpu.int_linear import NativeIntLinear, can_pack_integers

Layer = tuple[NativeIntLinear, torch.Tensor]


def make(
    bits: int, num_out: int, num_in: int, group_size: int, has_zeros: bool, has_bias: bool = False
) -> tuple[NativeIntLinear, torch.Tensor, torch.Tensor | None]:
    """A layer with its weight in float64 and its bias."""
    generator = torch.Generator().manual_seed(bits + num_out)
    groups = num_in // group_size
    levels = torch.randint(0, 1 << bits, (num_out, num_in), generator=generator).to(torch.uint8)
    scales = torch.rand(num_out, groups, generator=generator) + 0.1
    zeros = torch.randint(0, 1 << bits, (num_out, groups), generator=generator).float()
    middle = torch.full_like(zeros, float(1 << (bits - 1)))
    used = zeros if has_zeros else middle
    wide = levels.double().view(num_out, groups, -1) - used.double()[:, :, None]
    weight = (wide * scales.double()[:, :, None]).view(num_out, num_in)
    bias = torch.randn(num_out, generator=generator).bfloat16() if has_bias else None
    layer = NativeIntLinear(levels, scales, zeros if has_zeros else None, bits, bias)
    return layer, weight, bias


def rounded(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """What int8 with one scale a row and group makes of x."""
    groups = x.double().view(len(x), -1, group_size)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scale).round() * scale).view(x.shape)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("bits", "num_out", "num_in", "group_size"),
    [(8, 70, 36, 36), (8, 64, 64, 32), (4, 70, 40, 40), (4, 130, 96, 32), (4, 3, 8, 8)],
)
def test_products(
    dtype: torch.dtype, has_zeros: bool, bits: int, num_out: int, num_in: int, group_size: int
) -> None:
    layer, weight, bias = make(bits, num_out, num_in, group_size, has_zeros, has_bias=True)
    assert bias is not None
    for num_rows in (1, 7, 51):
        generator = torch.Generator().manual_seed(num_rows)
        x = torch.randn(num_rows, num_in, generator=generator).to(dtype)
        residual = torch.randn(num_rows, num_out, generator=generator).to(dtype)
        wanted = rounded(x, group_size) @ weight.T + bias.double() + residual.double()
        got = layer(x, residual, torch.float32).double()
        # A value halfway between two levels may go either way.
        assert (got - wanted).abs().max() < 1e-2 * wanted.abs().max()
        assert layer(x, residual).dtype == dtype


def test_inputs_that_are_levels_give_exact_products() -> None:
    layer, weight, _ = make(4, 66, 64, 32, has_zeros=True)
    x = torch.randint(-127, 128, (5, 64), generator=torch.Generator().manual_seed(0)).float()
    x[:, ::32] = 127
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_outlier_harms_only_its_group(bits: int) -> None:
    """Products with the other groups keep their precision."""
    layer, weight, _ = make(bits, 64, 96, 32, has_zeros=False)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    x[:, :32] = 0
    plain = layer(x).double()
    assert (plain - x.double() @ weight.T).abs().max() < 1e-2 * plain.abs().max()
    spike = torch.zeros_like(x)
    spike[:, 5] = 1e5
    assert (layer(x + spike).double() - layer(spike).double() - plain).abs().max() < 1.0


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_levels_and_inputs_do_not_overflow(bits: int) -> None:
    top = torch.full((64, 256), (1 << bits) - 1, dtype=torch.uint8)
    full = NativeIntLinear(top, torch.ones(64, 4), torch.zeros(64, 4), bits, None)
    for sign in (1.0, -1.0):
        x = torch.full((5, 256), 127.0 * sign)
        wanted = torch.full((5, 64), 256 * 127 * sign * ((1 << bits) - 1))
        assert torch.equal(full(x), wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_the_same_to_the_bit_in_every_batch(bits: int) -> None:
    layer, _, _ = make(bits, 100, 256, 64, has_zeros=True)
    x = torch.randn(60, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    alone = torch.cat([layer(x[i : i + 1]) for i in range(len(x))])
    for num_rows in (2, 7, 60):
        assert torch.equal(layer(x[:num_rows]), alone[:num_rows])


def test_an_input_of_zeros_gives_the_bias() -> None:
    layer, _, bias = make(8, 10, 16, 16, has_zeros=True, has_bias=True)
    assert bias is not None
    assert torch.equal(layer(torch.zeros(2, 16)), bias.float().expand(2, 10))


def test_what_can_be_packed() -> None:
    assert can_pack_integers(8, 36)
    assert can_pack_integers(4, 8)
    assert not can_pack_integers(4, 12)
    assert not can_pack_integers(3, 32)
