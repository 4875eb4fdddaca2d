"""Norms, activation, rotation and the KV write against their twins: bit for bit in half precision,
where both round at the same places."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import rms_norm as norms
from baton_kernels import rope_kv_write as ropes
from baton_kernels.gated_activation import clamped_swiglu as clamped_twin
from baton_kernels.gated_activation import geglu as geglu_twin
from baton_kernels.gated_activation import swiglu as swiglu_twin
from baton_kernels.gpu import rms_norm as norm_kernels
from baton_kernels.gpu import rope_kv_write as rope_kernels
from baton_kernels.gpu.gated_activation import clamped_swiglu, geglu, swiglu
from baton_kernels.kv_write import slot_rows
from baton_kernels.layer import Norm
from baton_kernels.quantize_rows import dequantize_rows
from baton_kernels.rope import rope_tables
from bench.gpu.paged_batch import in_one_memory

DTYPES = [torch.float32, torch.float16]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Up to two units in the last place."""
    eps = 2 * torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(got, wanted, rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 3, 33), (2, 2500)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype) * 3, randn(shape[-1], dtype=dtype, seed=1)
    wanted = norms.rms_norm(x, weight, 1e-5)
    assert_close(norm_kernels.rms_norm(x, weight, 1e-5), wanted)
    apart = torch.stack((x, x + 1), dim=-2)[..., 0, :]
    assert_close(norm_kernels.rms_norm(apart, weight, 1e-5), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 2 * 1030)])
def test_swiglu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype) * 5
    assert_close(swiglu(x), swiglu_twin(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 2 * 1030)])
def test_geglu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype)
    wanted = geglu_twin.twin(x.double())
    torch.testing.assert_close(geglu(x).double(), wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2 * 1030)])
def test_clamped_swiglu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype) * 5
    wanted = clamped_twin.twin(x.double())
    torch.testing.assert_close(clamped_swiglu(x).double(), wanted, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_a_weight_of_float32(dtype: torch.dtype) -> None:
    x, weight = randn(5, 33, dtype=dtype), randn(33, dtype=torch.float32, seed=1)
    assert_close(norm_kernels.rms_norm(x, weight, 1e-5), norms.rms_norm.twin(x, weight, 1e-5))


@pytest.mark.parametrize("pool_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(3, 1, 6, 6), (4, 2, 32, 16)])
def test_rope_kv_write(
    heads: int, kv_heads: int, dim: int, block_size: int,
    dtype: torch.dtype, pool_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """The tokens' vectors are parts of one fused matrix. Nothing but the tokens' slots is touched;
    one has none."""
    num_tokens, layer = 5, 1
    fused = randn(num_tokens, heads + 2 * kv_heads, dim, dtype=dtype) * 2
    fused[2, heads] = 0
    query, key, value = fused.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    positions = torch.tensor([0, 7, 900, 3, 5])
    cos, sin = rope_tables(positions, torch.rand(1, dim // 2), 1.0, dtype)
    shape = (4, 2, 2, kv_heads, block_size, dim)
    slots = torch.tensor([3, block_size, 0, -1, 3 * block_size + 1])
    rows = slot_rows(slots, torch.empty(shape))
    results = []
    for side in (rope_kernels, ropes):
        pool = torch.zeros(shape, dtype=pool_dtype or dtype)
        scales = None
        if pool_dtype is not None:
            pool, scales = in_one_memory(pool, torch.full(shape[:-1], -1.0))
        rotated = side.rope_kv_write(query, key, value, cos, sin, pool, layer, rows, scales)
        results.append((*rotated, pool, scales))
    (got_q, got_k, got_pool, got_scales), (q, k, pool, scales) = results
    assert_close(got_q, q)
    assert_close(got_k, k)
    if got_scales is None or scales is None:
        assert_close(got_pool, pool)
        return
    torch.testing.assert_close(got_scales, scales)
    # A code on the edge between two may fall to either side.
    assert (got_pool.int() - pool.int()).abs().max() <= 1
    assert (got_pool != pool).float().mean() < 0.01


@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 6), (4, 2, 32)])
def test_rope_kv_write_with_norms(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    """A head of zeros stays one. weight_dtype: of the norms' weights, if another than the
    heads'."""
    fused = randn(5, heads + 2 * kv_heads, dim, dtype=dtype) * 2
    fused[2, heads] = 0
    query, key, value = fused.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    cos, sin = rope_tables(torch.tensor([0, 7, 900, 3, 5]), torch.rand(1, dim // 2), 1.0, dtype)
    weights = (randn(dim, dtype=weight_dtype or dtype, seed=seed) for seed in (1, 2))
    norms = [Norm(weight, 10.0**-eps) for weight, eps in zip(weights, (5, 2), strict=True)]
    shape = (4, 2, 2, kv_heads, 16, dim)
    rows = slot_rows(torch.tensor([3, 16, 0, -1, 49]), torch.empty(shape))
    results = []
    for side in (rope_kernels, ropes):
        pool = torch.zeros(shape, dtype=dtype)
        args = query, key, value, cos, sin, pool, 1, rows, None
        results.append((*side.rope_kv_write(*args, *norms), pool))
        # One norm alone.
        results[-1] += side.rope_kv_write(*args, norms[0])[:1]
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted)


def test_rope_kv_write_in_float8() -> None:
    """Numbers that float8 holds exactly, not rotated: the interpreter's own rounding to float8 is
    wrong where it carries."""
    kv_heads, dim, shape = 2, 16, (2, 1, 2, 2, 8, 16)
    codes = torch.arange(6 * dim).reshape(1, 6, dim).to(torch.uint8).view(torch.float8_e4m3fn)
    fused = codes.float()
    fused[..., 0] = 448.0
    fused *= 0.25
    query, key, value = fused.split_with_sizes((2, kv_heads, kv_heads), dim=1)
    cos, sin = rope_tables(torch.zeros(1), torch.rand(1, dim // 2), 1.0, torch.float32)
    pool, scales = in_one_memory(
        torch.zeros(shape, dtype=torch.float8_e4m3fn), torch.zeros(shape[:-1])
    )
    rows = slot_rows(torch.tensor([11]), pool)
    rope_kernels.rope_kv_write(query, key, value, cos, sin, pool, 0, rows, scales)
    written = dequantize_rows(pool[1, 0, :, :, 3], scales[1, 0, :, :, 3], torch.float32)
    assert torch.equal(written, torch.stack((key[0], value[0])))
    assert pool.view(torch.uint8).count_nonzero() == codes[:, 2:].view(torch.uint8).count_nonzero()


def test_rows_that_are_not_finite_are_told_as_such() -> None:
    """A row of NaN and one of an infinity beside rows that are not touched by it."""
    kv_heads, dim, shape = 2, 16, (2, 1, 2, 2, 8, 16)
    fused = randn(2, 6, dim, dtype=torch.float32)
    fused[0, 2, 5], fused[1, 5, 3] = torch.nan, -torch.inf
    query, key, value = fused.split_with_sizes((2, kv_heads, kv_heads), dim=1)
    cos, sin = rope_tables(torch.zeros(2), torch.rand(1, dim // 2), 1.0, torch.float32)
    found = []
    for side in (rope_kernels, ropes):
        pool, scales = in_one_memory(torch.ones(shape, dtype=torch.int8), torch.zeros(shape[:-1]))
        rows = slot_rows(torch.tensor([11, 4]), pool)
        side.rope_kv_write(query, key, value, cos, sin, pool, 0, rows, scales)
        found.append((pool, scales))
    (got, got_scales), (wanted, scales) = found
    assert torch.equal(got, wanted)
    torch.testing.assert_close(got_scales, scales, equal_nan=True)
    assert scales.isnan().nonzero().tolist() == [[0, 0, 1, 1, 4], [1, 0, 0, 0, 3]]
    assert not wanted[scales.isnan()].any()
