"""Packing and unpacking against the twins, bit for bit."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import kv_pack as twins
from baton_kernels.gpu import kv_pack as kernels


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
