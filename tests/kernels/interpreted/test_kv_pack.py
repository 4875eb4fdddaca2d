"""Packing and unpacking against the twins, bit for bit."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import kv_pack as twins
from baton_kernels.gpu import kv_pack as kernels
from bench.gpu.paged_batch import in_one_memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.float32])
@pytest.mark.parametrize(
    ("block_size", "first_token", "num_tokens", "dim"), [(16, 0, 80, 8), (5, 7, 9, 6), (3, 2, 1, 1)]
)
def test_kv_pack(
    block_size: int, first_token: int, num_tokens: int, dim: int, dtype: torch.dtype
) -> None:
    num_blocks, block_ids = 20, [7, 3, 11, 0, 19]
    shape = (num_blocks, 3, 2, 2, block_size, dim)
    pool = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    got, wanted = (torch.empty(2, 2, 2, num_tokens, dim, dtype=dtype) for _ in range(2))
    kernels.kv_pack(pool, block_ids, first_token, 1, got)
    twins.kv_pack.twin(pool, block_ids, first_token, 1, wanted)
    assert torch.equal(got, wanted)
    empty, other = (torch.zeros(shape, dtype=dtype) for _ in range(2))
    kernels.kv_unpack(empty, block_ids, first_token, 1, got)
    twins.kv_unpack.twin(other, block_ids, first_token, 1, got)
    assert torch.equal(empty, other)


def test_codes_and_scales_of_one_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (20, 3, 2, 2, 4, 6), generator=generator, dtype=torch.int8)
    pool = in_one_memory(codes, torch.randn(codes.shape[:-1], generator=generator))
    target = in_one_memory(torch.zeros_like(codes), torch.zeros(codes.shape[:-1]))
    for source, empty in zip(pool, target, strict=True):
        rows, slots = (
            x if x.dim() == 6 else x.view(torch.int32)[..., None] for x in (source, empty)
        )
        packed = torch.empty(2, 2, 2, 9, rows.shape[5], dtype=rows.dtype)
        wanted = torch.empty_like(packed)
        kernels.kv_pack(rows, [7, 3, 11, 0, 19], 5, 1, packed)
        twins.kv_pack.twin(rows, [7, 3, 11, 0, 19], 5, 1, wanted)
        assert torch.equal(packed, wanted)
        kernels.kv_unpack(slots, [1, 2, 3, 4, 5], 5, 1, packed)
    wanted_codes, wanted_scales = torch.zeros_like(codes), torch.zeros(codes.shape[:-1])
    for token in range(5, 14):
        here, there = [7, 3, 11, 0, 19][token // 4], token // 4 + 1
        at = (slice(1, 3), slice(None), slice(None), token % 4)
        wanted_codes[there][at] = pool[0][here][at]
        wanted_scales[there][at] = pool[1][here][at]
    assert torch.equal(target[0], wanted_codes)
    assert torch.equal(target[1], wanted_scales)
