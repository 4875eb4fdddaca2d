"""Draws tokens on the device without a host round trip: the draw itself, with top-k and top-p from
token_filter. The other filters run as torch twins.

logits [rows, vocab] float32
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.token_filter import keep_top_k, keep_top_p

__all__ = ["gumbel_argmax", "keep_top_k", "keep_top_p"]

#: Tokens per program of the draw.
DRAW_BLOCK = 2048

_WEYL = tl.constexpr(0x9E3779B1)
_FIRST = tl.constexpr(0x7FEB352D)
_SECOND = tl.constexpr(0x846CA68B)


@triton.jit
def _mix(x):
    """See baton_kernels.sampling: the same bijection of 32-bit words."""
    x = x ^ (x >> 16)
    x = x * _FIRST
    x = x ^ (x >> 15)
    x = x * _SECOND
    return x ^ (x >> 16)


@triton.jit
def _log1p(x):
    """log(1 + x) for x in (-1, 0], to a few units in the last place even for tiny x (Kahan)."""
    one_more = 1.0 + x
    small = one_more == 1.0
    return tl.where(small, x, tl.log(one_more) * (x / tl.where(small, 1.0, one_more - 1.0)))


@triton.jit
def _noisy_max(
    logits_ptr, keys_ptr, best_ptr, best_id_ptr, vocab_size, num_parts, BLOCK: tl.constexpr
):
    """Grid (rows, parts): the largest logit plus noise in a part of the vocabulary, and the lowest
    id that has it."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    first = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
    second = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
    word = _mix(_mix((ids.to(tl.uint32) * _WEYL) ^ first) ^ second)
    # As in the twin: a signed word to float, then to the middle of one of 2^32 equal cells.
    signed = word.to(tl.int32, bitcast=True)
    unsigned = signed.to(tl.float32) + tl.where(signed < 0, 4294967296.0, 0.5)
    uniform = tl.minimum(tl.maximum(unsigned * 2.0**-32, 2.0**-33), 1.0 - 2.0**-24)
    noise = -tl.log(-_log1p(-uniform))
    x = tl.load(logits_ptr + row.to(tl.int64) * vocab_size + ids, mask=inside, other=float("-inf"))
    best, index = tl.max(x + noise, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + row * num_parts + part, best)
    tl.store(best_id_ptr + row * num_parts + part, part * BLOCK + index)


@triton.jit
def _take_best(best_ptr, best_id_ptr, chosen_ptr, num_parts, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    _, index = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(chosen_ptr + row, tl.load(best_id_ptr + row * num_parts + index).to(tl.int64))


def gumbel_argmax(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """See the twin. The noise agrees with the twin's to a few units in the last place."""
    _check(logits)
    if not keys.is_contiguous():
        raise ValueError("keys are not contiguous")
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, DRAW_BLOCK)
    best = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _noisy_max[(num_rows, num_parts)](
        logits,
        keys,
        best,
        best_id,
        vocab_size,
        num_parts,
        BLOCK=DRAW_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _take_best[(num_rows,)](
        best,
        best_id,
        chosen,
        num_parts,
        BLOCK=triton.next_power_of_2(num_parts),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return chosen


def _check(logits: torch.Tensor) -> None:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError("logits are not contiguous float32")
