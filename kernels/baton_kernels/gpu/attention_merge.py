"""Shared by the attention kernels: items, the running softmax over tiles of keys, and the merge of
partial results over ranges of keys.

    out = sum_i 2^(lse_i) part_i / sum_i 2^(lse_i), in order of i

A program merges one head of one token with split keys: see attention_plan.Launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.attention_plan import MERGE_FIELDS, Launch

#: Partial results that are merged at a time.
MERGE_PARTS = 16


@triton.jit
def read_item(items_ptr, ITEM: tl.constexpr):
    """Read the fields of this program's item; see attention_plan."""
    item = items_ptr + tl.program_id(0) * ITEM
    return (
        tl.load(item),
        tl.load(item + 1),
        tl.load(item + 2),
        tl.load(item + 3),
        tl.load(item + 4),
        tl.load(item + 5),
        tl.load(item + 6),
    )


@triton.jit
def online_softmax(s, peak, total, MASKED: tl.constexpr):
    """Update the running peak and total [rows] with scores s [rows, keys], in base 2. Returns the
    keys' weights, the factor by which earlier sums shrink, and the new peak and total."""
    new_peak = tl.maximum(peak, tl.max(s, 1))
    # A row that has seen no key keeps its peak of -inf; subtracting two of these would give NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(peak - base)
    return p, fade, new_peak, total * fade + tl.sum(p, 1)


@triton.jit(do_not_specialize_on_alignment=["merges_ptr"])
def _merge(
    merges_ptr, part_ptr, lse_ptr, out_ptr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PART_DIM: tl.constexpr, FIELDS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (merges, blocks of heads, GROUP). part [parts, blocks of heads, BLOCK_M, PART_DIM]."""
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    merge = merges_ptr + tl.program_id(0) * FIELDS
    token = tl.load(merge)
    row = tl.load(merge + 1) * GROUP + tl.program_id(2)
    first_part = tl.load(merge + 2)
    num_parts = tl.load(merge + 3)
    if num_parts > 0:
        dims = tl.arange(0, BLOCK_D)
        index = tl.arange(0, PARTS)
        peak = float("-inf")
        for start in range(0, num_parts, PARTS):
            at = ((first_part + start + index).to(tl.int64) * num_blocks + block) * BLOCK_M + row
            lse = tl.load(lse_ptr + at, mask=start + index < num_parts, other=float("-inf"))
            peak = tl.maximum(peak, tl.max(lse, 0))
        acc = tl.zeros([BLOCK_D], dtype=tl.float32)
        total = 0.0
        for start in range(0, num_parts, PARTS):
            there = start + index < num_parts
            at = ((first_part + start + index).to(tl.int64) * num_blocks + block) * BLOCK_M + row
            weight = tl.exp2(tl.load(lse_ptr + at, mask=there, other=float("-inf")) - peak)
            inside = there[:, None] & (dims < HEAD_DIM)[None, :]
            part = tl.load(
                part_ptr + at[:, None] * PART_DIM + dims[None, :], mask=inside, other=0.0
            )
            acc += tl.sum(part * weight[:, None], 0)
            total += tl.sum(weight, 0)
        head = block * GROUP + tl.program_id(2)
        out_at = (token.to(tl.int64) * (num_blocks * GROUP) + head) * HEAD_DIM
        tl.store(
            out_ptr + out_at + dims,
            (acc / total).to(out_ptr.dtype.element_ty),
            mask=dims < HEAD_DIM,
        )


def merge_parts(launch: Launch, out: torch.Tensor) -> None:
    """Merge parts into their rows of out [tokens, heads, dim]; only the first `dim` elements of a
    part are used."""
    if not len(launch.merges):
        return
    num_blocks, (num_heads, dim) = launch.part.shape[1], out.shape[1:]
    group = num_heads // num_blocks
    _merge[(len(launch.merges), num_blocks, group)](
        launch.merges, launch.part, launch.lse, out,
        GROUP=group, HEAD_DIM=dim, PART_DIM=launch.part.shape[3], FIELDS=MERGE_FIELDS,
        PARTS=MERGE_PARTS, BLOCK_M=launch.tile.block_m,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
