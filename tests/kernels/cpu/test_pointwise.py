"""The small native kernels give what their twins give."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.gated_activation import clamped_swiglu, geglu, swiglu
from baton_kernels.kv_write import slot_rows
from baton_kernels.rms_norm import rms_norm
from baton_kernels.rope_kv_write import rope_kv_write

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 2, 33), (70, 48), (1, 256)])
def test_rms_norm(generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=generator).to(dtype) * 3
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm.twin(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_a_weight_of_float32(generator: torch.Generator, dtype: torch.dtype) -> None:
    x = torch.randn(5, 33, generator=generator).to(dtype) * 3
    weight = torch.randn(33, generator=generator)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm.twin(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_a_part_of_each_row(generator: torch.Generator, dtype: torch.dtype) -> None:
    fused = torch.randn(4, 6, 16, generator=generator).to(dtype)
    weight = torch.randn(16, generator=generator).to(dtype)
    part = fused[:, 1:3]
    torch.testing.assert_close(rms_norm(part, weight, 1e-6), rms_norm.twin(part, weight, 1e-6))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (5, 66), (40, 96)])
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_swiglu(
    generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, int], size: float
) -> None:
    x = (torch.randn(shape, generator=generator) * size).to(dtype)
    torch.testing.assert_close(swiglu(x), swiglu.twin(x))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (5, 66), (40, 96)])
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_geglu(
    generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, int], size: float
) -> None:
    x = (torch.randn(shape, generator=generator) * size).to(dtype)
    # Far below zero torch's own form cancels, and is a few 1e-5 off.
    torch.testing.assert_close(geglu(x), geglu.twin(x), atol=1e-4, rtol=torch.finfo(dtype).eps * 4)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (40, 96)])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_clamped_swiglu(
    generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, int], size: float
) -> None:
    x = (torch.randn(shape, generator=generator) * size).to(dtype)
    # The twin rounds within the gate, too.
    tolerance = max(1e-5, torch.finfo(dtype).eps * 4)
    wanted = clamped_swiglu.twin(x.double()).to(dtype)
    torch.testing.assert_close(clamped_swiglu(x), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 18, 32, 128])
def test_rope_and_kv_write_to_the_bit(
    generator: torch.Generator, dtype: torch.dtype, head_dim: int
) -> None:
    num_tokens, heads, kv_heads = 41, 4, 2
    shape = (num_tokens, heads + 2 * kv_heads, head_dim)
    fused = torch.randn(shape, generator=generator).to(dtype)
    query, key, value = fused.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    cos, sin = torch.randn(2, num_tokens, head_dim // 2, generator=generator).to(dtype)
    pools = [torch.zeros(11, 3, 2, kv_heads, 4, head_dim, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(44, generator=generator)[:num_tokens]
    slots[7] = -1
    rows = slot_rows(slots, pools[0])
    got = rope_kv_write(query, key, value, cos, sin, pools[0], 1, rows)
    wanted = rope_kv_write.twin(query, key, value, cos, sin, pools[1], 1, rows)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])
    assert torch.equal(*pools)


def test_other_dtypes_run_the_twin() -> None:
    x = torch.randn(2, 8, dtype=torch.float64)
    assert torch.equal(swiglu(x), swiglu.twin(x))
    assert torch.equal(rms_norm(x, x[0], 1e-5), rms_norm.twin(x, x[0], 1e-5))
