"""Choose tokens from logits without asking the device: top-k, top-p, and the draw. The other
filters are their twins.

A row's threshold is found by bisection over the 32 bits of an order-preserving code of float32, a
pass over the row for each: the largest code c for which enough tokens (top-k) or enough probability
(top-p) have codes >= c. No sort, and no row depends on another.

    logits [rows, vocab] float32
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Tokens that a program looks at at once in a filter, and that one program of the draw takes.
FILTER_BLOCK = 4096
DRAW_BLOCK = 2048

_SIGN = tl.constexpr(0x80000000)
_ALL = tl.constexpr(0xFFFFFFFF)
_WEYL = tl.constexpr(0x9E3779B1)
_FIRST = tl.constexpr(0x7FEB352D)
_SECOND = tl.constexpr(0x846CA68B)


@triton.jit
def _code(x):
    """uint32 in the order of float32; both zeros have one code."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >= _SIGN, _ALL, _SIGN)


@triton.jit
def _keep_top_k(logits_ptr, top_k_ptr, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * vocab_size
    wanted = tl.load(top_k_ptr + row).to(tl.int32)
    ids = tl.arange(0, BLOCK)
    threshold = tl.full([], 0, tl.uint32)
    for step in range(32):
        trial = threshold | (tl.full([], _SIGN, tl.uint32) >> step)
        counts = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            x = tl.load(
                logits_ptr + start + ids, mask=start + ids < vocab_size, other=float("-inf")
            )
            counts += ((_code(x) >= trial) & (start + ids < vocab_size)).to(tl.int32)
        threshold = tl.where(tl.sum(counts, 0) >= wanted, trial, threshold)
    for start in range(0, vocab_size, BLOCK):
        inside = start + ids < vocab_size
        x = tl.load(logits_ptr + start + ids, mask=inside, other=0.0)
        tl.store(logits_ptr + start + ids, float("-inf"), mask=inside & (_code(x) < threshold))


@triton.jit
def _keep_top_p(logits_ptr, top_p_ptr, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * vocab_size
    top_p = tl.load(top_p_ptr + row)
    ids = tl.arange(0, BLOCK)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(logits_ptr + start + ids, mask=start + ids < vocab_size, other=float("-inf"))
        peaks = tl.maximum(peaks, x)
    peak = tl.max(peaks, 0)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(logits_ptr + start + ids, mask=start + ids < vocab_size, other=float("-inf"))
        masses += tl.exp(x - peak)
    wanted = tl.sum(masses, 0) * top_p
    threshold = tl.full([], 0, tl.uint32)
    above = 0.0
    for step in range(32):
        trial = threshold | (tl.full([], _SIGN, tl.uint32) >> step)
        masses = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            x = tl.load(
                logits_ptr + start + ids, mask=start + ids < vocab_size, other=float("-inf")
            )
            masses += tl.where(_code(x) >= trial, tl.exp(x - peak), 0.0)
        mass = tl.sum(masses, 0)
        enough = mass >= wanted
        # The last trial that was not enough is the threshold's successor: its mass is what lies
        # above.
        above = tl.where(enough, above, mass)
        threshold = tl.where(enough, trial, threshold)
    # Of the tokens at the threshold, those with the lowest ids that are still missing.
    bits = threshold ^ tl.where(threshold >= _SIGN, _SIGN, _ALL)
    weight = tl.exp(bits.to(tl.float32, bitcast=True) - peak)
    missing = tl.where(
        weight > 0.0, tl.ceil((wanted - above) / tl.where(weight > 0.0, weight, 1.0)), 1.0
    )
    missing = tl.minimum(tl.maximum(missing, 1.0), 2147483520.0).to(tl.int32)
    seen = 0
    for start in range(0, vocab_size, BLOCK):
        inside = start + ids < vocab_size
        x = tl.load(logits_ptr + start + ids, mask=inside, other=0.0)
        code = _code(x)
        equal = ((code == threshold) & inside).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        dropped = (code < threshold) | ((equal > 0) & (rank > missing))
        tl.store(logits_ptr + start + ids, float("-inf"), mask=inside & dropped)
        seen += tl.sum(equal, 0)


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
    """log(1 + x) for x in (-1, 0], right to a few units in the last place however small x is
    (Kahan)."""
    one_more = 1.0 + x
    small = one_more == 1.0
    return tl.where(small, x, tl.log(one_more) * (x / tl.where(small, 1.0, one_more - 1.0)))


@triton.jit
def _noisy_max(
    logits_ptr, keys_ptr, best_ptr, best_id_ptr, vocab_size, num_parts, BLOCK: tl.constexpr
):
    """Grid (rows, parts): the largest logit plus noise of a part of the vocabulary, and the lowest
    id that has it."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    first = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
    second = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
    word = _mix(_mix((ids.to(tl.uint32) * _WEYL) ^ first) ^ second)
    # As the twin: a signed word to float, then to the middle of one of 2^32 equal cells.
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


def keep_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> None:
    """See the twin."""
    _check(logits)
    _keep_top_k[(logits.shape[0],)](
        logits,
        top_k,
        logits.shape[1],
        BLOCK=_filter_block(logits),
        num_warps=16,
        enable_fp_fusion=False,
    )


def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """See the twin. Sums are taken in another order: a set whose probability is top_p to rounding
    may be one larger."""
    _check(logits)
    _keep_top_p[(logits.shape[0],)](
        logits,
        top_p,
        logits.shape[1],
        BLOCK=_filter_block(logits),
        num_warps=16,
        enable_fp_fusion=False,
    )


def gumbel_argmax(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """See the twin. The noise is the twin's to a few units in the last place."""
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


def _filter_block(logits: torch.Tensor) -> int:
    return min(FILTER_BLOCK, int(triton.next_power_of_2(logits.shape[1])))


def _check(logits: torch.Tensor) -> None:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError("logits are not contiguous float32")
