"""Pack a token range of a block table into contiguous memory, and unpack it again.

packed [layers, parts, kv_heads, tokens, head_dim]; packed[l, k, h, t] = pool[table[p // size],
first_layer + l, k, h, p % size] with p = first_token + t.

kv_pack_summed, kv_unpack_summed: a payload of runs (see the twin) and its word_sum in the same
pass. Each program adds the sum of its rows to the total, in any order.

The pool keeps the rows of one block, layer, part and head contiguous; heads lie stride elements
apart: see kv_write.

A program copies TOKENS rows of head_dim elements of one layer, part and head: contiguous in the
payload, one piece per block in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from baton_kernels import word_sum
from baton_kernels.kv_pack import Runs
from baton_kernels.kv_write import head_stride

TOKENS = 64
STEP = tl.constexpr(word_sum.STEP)
FIRST = tl.constexpr(word_sum.FIRST)
SECOND = tl.constexpr(word_sum.SECOND)


@triton.jit(do_not_specialize=["key", "first_token", "num_tokens", "run_tokens", "first_head"])
def _copy(
    pool_ptr, packed_ptr, table_ptr, total_ptr, key: tl.uint64, first_token, num_tokens, run_tokens,
    block_heads, first_head, stride,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
    UNPACK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles, layers * parts * kv_heads). key, total_ptr: used with SUM only."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    there = tokens < num_tokens
    dims = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (dims < HEAD_DIM)[None, :]
    at = first_token + tokens
    block = tl.load(table_ptr + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    group = block * block_heads + first_head + head
    in_pool = pool_ptr + (group * stride + at % BLOCK_SIZE * HEAD_DIM)[:, None] + dims[None, :]
    run_first = tl.maximum(at // run_tokens * run_tokens, first_token)
    run_end = tl.minimum((at // run_tokens + 1) * run_tokens, first_token + num_tokens)
    before = (run_first - first_token).to(tl.int64) * tl.num_programs(1)
    row = before + head.to(tl.int64) * (run_end - run_first) + (at - run_first)
    index = row[:, None] * HEAD_DIM + dims[None, :]
    if UNPACK:
        values = tl.load(packed_ptr + index, mask=inside, other=0)
        tl.store(in_pool, values, mask=inside)
    else:
        values = tl.load(in_pool, mask=inside, other=0)
        tl.store(packed_ptr + index, values, mask=inside)
    if SUM:
        terms = _terms(values.to(tl.uint64, bitcast=True), key + index.to(tl.uint64) * STEP)
        total = tl.sum(tl.sum(tl.where(inside, terms, 0), 1), 0)
        tl.atomic_add(total_ptr, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _terms(words, keys):
    """Terms of the words in a word_sum."""
    x = words ^ keys
    x = (x ^ (x >> 32)) * FIRST
    x = (x ^ (x >> 29)) * SECOND
    return (x ^ (x >> 32)) * (keys | 1)


def kv_pack(
    pool: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    first_token: int,
    first_layer: int,
    packed: torch.Tensor,
) -> None:
    """See the twin. `packed` may be on another device: then it is filled by one copy. block_ids may
    be an int32 tensor on the device."""
    runs = _one_run(first_token, first_layer, packed)
    if packed.device == pool.device and packed.is_contiguous():
        _launch(pool, block_ids, runs, packed, None, 0, is_unpack=False)
        return
    staging = torch.empty(packed.shape, dtype=packed.dtype, device=pool.device)
    _launch(pool, block_ids, runs, staging, None, 0, is_unpack=False)
    packed.copy_(staging)


def kv_unpack(
    pool: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    first_token: int,
    first_layer: int,
    packed: torch.Tensor,
) -> None:
    """See the twin. `packed` may be on another device: then it is read by one copy. block_ids may
    be an int32 tensor on the device."""
    there = packed.to(pool.device).contiguous()
    runs = _one_run(first_token, first_layer, packed)
    _launch(pool, block_ids, runs, there, None, 0, is_unpack=True)


def kv_pack_summed(
    pool: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    runs: Runs,
    payload: torch.Tensor,
    key: int,
) -> torch.Tensor:
    """See the twin. `payload` may be the memory of another device that this one can write to."""
    return _launch_summed(pool, block_ids, runs, payload, key, is_unpack=False)


def kv_unpack_summed(
    pool: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    runs: Runs,
    payload: torch.Tensor,
    key: int,
) -> torch.Tensor:
    """See the twin. Each word is read once, so the sum is over the bytes written."""
    return _launch_summed(pool, block_ids, runs, payload, key, is_unpack=True)


def _launch_summed(
    pool: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    runs: Runs,
    payload: torch.Tensor,
    key: int,
    *,
    is_unpack: bool,
) -> torch.Tensor:
    if pool.dtype != torch.int64:
        raise ValueError(f"words of {pool.dtype}")
    total = torch.zeros((), dtype=torch.int64, device=pool.device)
    _launch(pool, block_ids, runs, payload, total, key, is_unpack=is_unpack)
    return total


def _launch(
    pool: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    runs: Runs,
    packed: torch.Tensor,
    total: torch.Tensor | None,
    key: int,
    *,
    is_unpack: bool,
) -> None:
    """total: int64 [], to which the word_sum is added; None: no sum."""
    if packed.dtype != pool.dtype:
        raise ValueError(f"packed {packed.dtype}, pool {pool.dtype}")
    _, num_layers, num_parts, num_kv_heads, block_size, head_dim = pool.shape
    layer_heads = num_parts * num_kv_heads
    table = torch.as_tensor(block_ids, dtype=torch.int32, device=pool.device)
    _copy[(triton.cdiv(runs.num_tokens, TOKENS), runs.num_layers * layer_heads)](
        pool, packed, table, table if total is None else total, key,
        runs.first_token, runs.num_tokens, runs.run_tokens,
        num_layers * layer_heads, runs.first_layer * layer_heads, head_stride(pool),
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        TOKENS=TOKENS, UNPACK=is_unpack, SUM=total is not None, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


def _one_run(first_token: int, first_layer: int, packed: torch.Tensor) -> Runs:
    """One run with all of `packed` [layers, parts, kv_heads, tokens, head_dim]."""
    num_tokens = packed.shape[3]
    return Runs(first_token, num_tokens, first_layer, packed.shape[0], first_token + num_tokens)
