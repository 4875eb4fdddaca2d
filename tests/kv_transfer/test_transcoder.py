"""Elements are converted as torch converts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kv_transfer.transcoder import BITS, FP8_MAX, fp8_of, from_fp8, narrow, widen

quick = settings(deadline=None, database=None, max_examples=100)
ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)
FLOATS = hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(width=32))


def values_of(bits: np.ndarray, dtype: str) -> np.ndarray:
    out = np.empty(bits.shape, np.float32)
    widen(bits.view(BITS[dtype]), dtype, out)
    return out


def elements_of(values: np.ndarray, dtype: str) -> np.ndarray:
    out = np.empty(values.shape, BITS[dtype])
    narrow(values, dtype, out, np.empty_like(values))
    return out


def codes_of(values: np.ndarray) -> np.ndarray:
    out = np.empty(values.shape, np.uint8)
    fp8_of(values.copy(), out, np.empty_like(values))
    return out


def values_of_fp8(codes: np.ndarray) -> np.ndarray:
    out = np.empty(codes.shape, np.float32)
    from_fp8(codes, out)
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_pattern_of_16_bits_means_what_it_means_to_torch(dtype):
    values = values_of(ALL_16_BITS, dtype)
    expected = torch.from_numpy(ALL_16_BITS.copy()).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_pattern_of_16_bits_comes_back(dtype):
    values = values_of(ALL_16_BITS, dtype)
    out = elements_of(values, dtype).view(np.uint16)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(out[~is_nan], ALL_16_BITS[~is_nan])
    assert np.isnan(values_of(out[is_nan], dtype)).all()


@quick
@given(FLOATS, st.sampled_from(["float32", "bfloat16", "float16"]))
def test_values_become_the_nearest_element(values, dtype):
    expected = torch.from_numpy(values.copy()).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(values_of(elements_of(values, dtype), dtype), expected)


def test_every_fp8_means_what_it_means_to_torch():
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(values_of_fp8(codes), expected)


@quick
@given(hnp.arrays(np.float32, 50, elements=st.floats(-FP8_MAX, FP8_MAX, width=32)))
def test_values_become_the_nearest_fp8(values):
    codes = codes_of(values)
    expected = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    # Apart from the sign of zero, which means nothing.
    np.testing.assert_array_equal(values_of_fp8(codes), values_of_fp8(expected))


def test_the_middles_between_fp8_go_to_the_even_one():
    levels = values_of_fp8(np.arange(0x7F, dtype=np.uint8))
    codes = codes_of((levels[1:] + levels[:-1]) / 2)
    assert not (codes % 2).any()
