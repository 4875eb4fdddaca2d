"""The kernels of latent attention against their formula, their twins, and themselves in other
batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton_kernels import kv_pack as pack_twins
from baton_kernels import latent_kv_write as write_twins
from baton_kernels import paged_attention as twins
from baton_kernels.gpu import attention_merge, attention_plan
from baton_kernels.gpu import kv_pack as pack_kernels
from baton_kernels.gpu import latent_kv_write as write_kernels
from baton_kernels.gpu import paged_attention as kernels
from baton_kernels.kv_write import slot_rows
from baton_kernels.layer import Norm
from baton_kernels.paged_attention import ScoreTerms
from baton_kernels.quantize_rows import dequantize_rows, quantize_rows
from baton_kernels.rope import rope_tables
from bench.gpu.paged_batch import (
    Heads,
    PagedBatch,
    in_one_memory,
    make_paged_batch,
    reference_attention,
)

#: Several items of few new tokens, a prompt's chunk of several tiles, and prompts from the start.
MIXED = [(0, 1), (70, 1), (63, 3), (0, 9), (11, 30)]
#: One block of heads; several, of which each has 5; widths that are no powers of two.
SHAPES = [Heads(4, 1, 40, 32), Heads(35, 1, 40, 32), Heads(3, 1, 30, 24)]


@pytest.fixture(autouse=True)
def _short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "SPLIT_TOKENS", 32)
    monkeypatch.setattr(attention_merge, "MERGE_PARTS", 2)


def batch_of(heads: Heads, block_size: int, dtype: torch.dtype = torch.float32) -> PagedBatch:
    generator = torch.Generator().manual_seed(heads.num_heads)
    return make_paged_batch(MIXED, heads, block_size, dtype, generator)


def run(
    batch: PagedBatch, pool: torch.Tensor | None = None, scales: torch.Tensor | None = None
) -> torch.Tensor:
    pool = batch.pool if pool is None else pool
    num_heads = batch.query.shape[1]
    plan = kernels.plan_attention(batch.slices, pool, num_heads, 0.3, None, batch.query.dtype)
    return kernels.paged_attention(
        batch.query, batch.key, batch.value, pool, batch.layer, plan, scales
    )


@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("heads", SHAPES)
def test_mixed_batch(heads: Heads, block_size: int) -> None:
    batch = batch_of(heads, block_size)
    got = run(batch)
    assert got.shape[2] == heads.value_dim
    torch.testing.assert_close(got.double(), reference_attention(batch, 0.3), atol=2e-5, rtol=1e-4)
    plan = twins.plan_attention.twin(batch.slices, batch.pool, heads.num_heads, 0.3, None)
    twin = twins.paged_attention.twin(
        batch.query, batch.key, batch.value, batch.pool, batch.layer, plan
    )
    torch.testing.assert_close(got, twin, atol=2e-5, rtol=1e-4)


def test_half_precision() -> None:
    batch = batch_of(SHAPES[1], 16, torch.float16)
    wanted = reference_attention(batch, 0.3)
    torch.testing.assert_close(run(batch).double(), wanted, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_pool(dtype: torch.dtype) -> None:
    """One scale for both parts of a row. What no token wrote is garbage in the scales too."""
    heads = SHAPES[0]
    batch = batch_of(heads, 6)
    pool, scales = in_one_memory(*quantize_rows(batch.pool, dtype))
    rounded = [
        dequantize_rows(*quantize_rows(keys, dtype), torch.float32) for keys, _ in batch.history
    ]
    batch = replace(batch, history=tuple((keys, keys[..., : heads.value_dim]) for keys in rounded))
    torch.testing.assert_close(
        run(batch, pool, scales).double(), reference_attention(batch, 0.3), atol=2e-5, rtol=1e-4
    )


def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch() -> None:
    batch = batch_of(SHAPES[1], 16)
    together = run(batch)
    for part in batch.slices:
        rows = slice(part.first_row, part.first_row + part.num_tokens)
        own = replace(batch, slices=(part._replace(first_row=0),), query=batch.query[rows])
        assert torch.equal(run(own), together[rows])


def test_heads_are_cut_into_as_few_blocks_as_tiles_hold() -> None:
    pool = torch.empty(1, 1, 1, 1, 16, 576, device="meta")
    found = {heads: attention_plan.head_blocks(pool, heads) for heads in (1, 16, 32, 35, 64, 128)}
    assert found == {1: 1, 16: 1, 32: 1, 35: 5, 64: 2, 128: 4}


def test_what_no_latent_model_has_is_refused() -> None:
    batch = batch_of(SHAPES[0], 16)
    plan = kernels.plan_attention(batch.slices, batch.pool, 4, 0.3, 9)
    args = batch.query, batch.key, batch.value, batch.pool, batch.layer
    with pytest.raises(ValueError, match="with a window"):
        kernels.paged_attention(*args, plan)
    plan = kernels.plan_attention(batch.slices, batch.pool, 4, 0.3, None)
    with pytest.raises(ValueError, match="with terms"):
        kernels.paged_attention(*args, plan, None, ScoreTerms(3.0))


def test_rows_are_packed_and_unpacked() -> None:
    generator = torch.Generator().manual_seed(2)
    pool = torch.randn(5, 3, 1, 1, 6, 40, generator=generator)
    packed, wanted = torch.zeros(2, 1, 1, 11, 40), torch.zeros(2, 1, 1, 11, 40)
    pack_kernels.kv_pack(pool, [4, 0, 2], 3, 1, packed)
    pack_twins.kv_pack.twin(pool, [4, 0, 2], 3, 1, wanted)
    assert torch.equal(packed, wanted)
    back, wanted_back = torch.zeros_like(pool), torch.zeros_like(pool)
    pack_kernels.kv_unpack(back, [1, 3, 0], 3, 1, packed)
    pack_twins.kv_unpack.twin(wanted_back, [1, 3, 0], 3, 1, packed)
    assert torch.equal(back, wanted_back)


@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("pool_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_heads", "rank", "dim"), [(3, 24, 6), (5, 32, 16)])
def test_writing(
    num_heads: int, rank: int, dim: int, dtype: torch.dtype, pool_dtype: torch.dtype | None,
    weight_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Several programs a token, of which one writes its row. One token has no slot."""
    monkeypatch.setattr(write_kernels, "PROGRAM_ELEMENTS", 64)
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    fused = randn(5, num_heads, rank + dim).to(dtype)
    latent = randn(5, rank + dim).to(dtype) * 2
    absorbed, turned = fused.split_with_sizes((rank, dim), dim=2)
    norm = Norm(randn(rank).to(weight_dtype or dtype), 1e-5)
    cos, sin = rope_tables(torch.tensor([0, 7, 900, 3, 5]), torch.rand(1, dim // 2), 1.0, dtype)
    shape = (4, 2, 1, 1, 6, rank + dim)
    rows = slot_rows(torch.tensor([3, 6, 0, -1, 19]), torch.empty(shape))
    results = []
    for side in (write_kernels, write_twins):
        pool, scales = torch.zeros(shape, dtype=pool_dtype or dtype), None
        if pool_dtype is not None:
            pool, scales = in_one_memory(pool, torch.full(shape[:-1], -1.0))
        given = absorbed, turned, latent, norm, cos, sin, pool, 1, rows, scales
        results.append((*side.latent_kv_write(*given), pool, scales))
    (query, row, pool, scales), (wanted_query, wanted_row, wanted, wanted_scales) = results
    close = {"atol": 2e-3, "rtol": 2e-3} if dtype == torch.float16 else {}
    torch.testing.assert_close(query, wanted_query, **close)
    torch.testing.assert_close(row, wanted_row, **close)
    if scales is None:
        torch.testing.assert_close(pool, wanted, **close)
        return
    torch.testing.assert_close(scales, wanted_scales, **close)
    # A code on the edge between two may fall to either side.
    assert (pool.int() - wanted.int()).abs().max() <= 1
    assert (pool != wanted).float().mean() < 0.01
