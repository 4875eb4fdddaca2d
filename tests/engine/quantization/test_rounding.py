"""Packing and rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.quantized_checkpoints import round_to_float8, round_to_integers
from engine.quantization.packing import pack, unpack
from engine.quantization.weight import Float8Weight, QuantizedWeight, stack


@settings(max_examples=50, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_unpack_undoes_pack(bits: int, rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 1 << bits, (rows, columns), generator=generator).to(torch.uint8)
    words = pack(levels, bits)
    assert words.dtype == torch.int32
    assert words.shape[1] == -(-columns * bits // 32)
    assert torch.equal(unpack(words, bits, columns), levels)


@pytest.mark.parametrize(("bits", "group_size", "share"), [(8, 64, 0.01), (4, 32, 0.12)])
def test_rounding_loses_little(bits: int, group_size: int, share: float) -> None:
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    rounded = round_to_integers(weight, bits, group_size)
    assert rounded.scales.shape == (20, 64 // group_size)
    assert int(rounded.levels.max()) < 1 << bits
    error = (rounded.dequantize() - weight).norm() / weight.norm()
    assert error < share


def test_an_outlier_does_not_spoil_its_group() -> None:
    """Clipping it a little costs less than making every level coarser."""
    weight = torch.randn(1, 128, generator=torch.Generator().manual_seed(2))
    weight[0, 0] = weight.abs().max() * 1.2
    error = (round_to_integers(weight, 4, 128).dequantize() - weight).square().sum()
    scale = weight.abs().max() / 7.5
    plain = ((weight / scale).round().clamp(-8, 7) * scale - weight).square().sum()
    assert error < plain


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(3, 32)
    assert torch.equal(round_to_integers(zeros, 4, 32).dequantize(), zeros)
    numbers, scales = round_to_float8(zeros)
    assert torch.equal(numbers.float() * scales, zeros)


def test_float8_keeps_three_bits_of_mantissa() -> None:
    weight = torch.randn(9, 40, generator=torch.Generator().manual_seed(3))
    numbers, scales = round_to_float8(weight)
    error = (numbers.float() * scales - weight).abs()
    # Half a step of a normal number, or of the smallest ones.
    assert (error <= weight.abs() / 16 + scales * 2**-10).all()


def test_stacking_keeps_each_weight() -> None:
    generator = torch.Generator().manual_seed(4)
    symmetric = round_to_integers(torch.randn(5, 32, generator=generator), 4, 16)
    levels = torch.randint(0, 16, (3, 32), generator=generator).to(torch.uint8)
    shifted = QuantizedWeight(levels, torch.rand(3, 2, generator=generator), torch.ones(3, 2), 4)
    for parts in ([symmetric, symmetric], [symmetric, shifted], [shifted]):
        wanted = torch.cat([part.dequantize() for part in parts])
        assert torch.equal(stack(parts).dequantize(), wanted)
    of_bytes = round_to_integers(torch.randn(2, 32, generator=generator), 8, 16)
    wanted = torch.cat([symmetric.dequantize(), of_bytes.dequantize()])
    assert torch.equal(stack([symmetric, of_bytes]).dequantize(), wanted), "as 8 bits"
    floats = Float8Weight(*round_to_float8(torch.ones(2, 32)), 32)
    with pytest.raises(ValueError, match="schemes"):
        stack([symmetric, floats])
