"""Keep a row's likeliest tokens: -inf for all others. See the twins.

A row's threshold is found digit by digit in an order-preserving code of float32 (radix selection):
among the codes with the digits found so far, the mass of each next digit is summed, and the largest
digit with enough mass at or above it is chosen. A token's mass is 1 for top-k and its unnormalised
probability for top-p. There is no sort, and rows are independent.

Each pass over the logits finds one digit of DIGIT_BITS. A pass is one launch of (rows, parts)
programs, so that many multiprocessors share a row; each reads PART tokens once and stores its
masses by digit. The programs of the next launch add the masses of all parts, in order, and choose
the digit. Without atomics, results do not depend on timing.

logits [rows, vocab] float32; sums [passes, rows, parts, DIGITS] float32; results of each pass:
codes [passes, rows] int32, the digits so far, and aboves [passes, rows] float32, the mass of all
codes above those with these digits
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Tokens per program, and tokens that it reads at a time.
PART = 4096
CHUNK = 256
DIGIT_BITS = tl.constexpr(4)
DIGITS = tl.constexpr(16)
PASSES = 8

_SIGN = tl.constexpr(0x80000000)
_ALL = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _code(x):
    """uint32 code in the order of float32; both zeros have the same code."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >= _SIGN, _ALL, _SIGN)


@triton.jit
def _number(code):
    """The inverse of _code."""
    bits = code ^ tl.where(code >= _SIGN, _SIGN, _ALL)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _peak(peaks_ptr, row, num_parts, PARTS: tl.constexpr):
    """The largest logit of a row."""
    parts = tl.arange(0, PARTS)
    at = row * num_parts + parts
    return tl.max(tl.load(peaks_ptr + at, mask=parts < num_parts, other=float("-inf")), 0)


@triton.jit
def _masses(sums_ptr, step, row, num_rows, num_parts, PARTS: tl.constexpr):
    """Masses by digit [DIGITS] of pass `step`, summed over all parts."""
    parts = tl.arange(0, PARTS)
    digits = tl.arange(0, DIGITS)
    at = ((step * num_rows + row) * num_parts + parts)[:, None] * DIGITS + digits[None, :]
    return tl.sum(tl.load(sums_ptr + at, mask=(parts < num_parts)[:, None], other=0.0), 0)


@triton.jit
def _take_digit(
    sums_ptr, codes_ptr, aboves_ptr, wanted_ptr, step, row, num_rows, num_parts,
    PARTS: tl.constexpr, IS_SHARE: tl.constexpr,
):  # fmt: skip
    """State after passes up to `step`: the code so far, the last digit, the mass above, and the
    mass wanted."""
    wanted = tl.load(wanted_ptr + row).to(tl.float32)
    if IS_SHARE:
        wanted *= tl.sum(_masses(sums_ptr, 0, row, num_rows, num_parts, PARTS), 0)
    code = tl.full([], 0, tl.uint32)
    above = tl.full([], 0.0, tl.float32)
    if step > 0:
        code = tl.load(codes_ptr + (step - 1) * num_rows + row).to(tl.uint32, bitcast=True)
        above = tl.load(aboves_ptr + (step - 1) * num_rows + row)
    masses = _masses(sums_ptr, step, row, num_rows, num_parts, PARTS)
    digits = tl.arange(0, DIGITS)
    is_from = digits[None, :] >= digits[:, None]
    from_digit = above + tl.sum(tl.where(is_from, masses[None, :], 0.0), 1)
    # With rounding, or NaN among the logits, even all tokens may be too few: then keep all.
    digit = tl.max(tl.where(from_digit >= wanted, digits, 0), 0)
    above += tl.sum(tl.where(digits > digit, masses, 0.0), 0)
    return (code << DIGIT_BITS) | digit.to(tl.uint32), digit, above, wanted


@triton.jit
def _part_peaks(logits_ptr, peaks_ptr, vocab_size, num_parts, PART: tl.constexpr):
    """Grid (rows, parts): the largest logit of each part."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    at = row.to(tl.int64) * vocab_size + ids
    x = tl.load(logits_ptr + at, mask=ids < vocab_size, other=float("-inf"))
    tl.store(peaks_ptr + row * num_parts + part, tl.max(x, 0))


@triton.jit(do_not_specialize=["step"])
def _add_up_digits(
    logits_ptr, wanted_ptr, peaks_ptr, sums_ptr, counts_ptr, codes_ptr, aboves_ptr,
    vocab_size, num_parts, step,
    PART: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, PASSES: tl.constexpr,
    IS_FIRST: tl.constexpr, IS_SHARE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts): pass `step`. counts [rows, parts, DIGITS] int32: tokens by digit in the
    last pass, for ties at the threshold."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    num_rows = tl.num_programs(0)
    shift = 32 - DIGIT_BITS * (step + 1)
    begins = tl.full([], 0, tl.uint32)
    if not IS_FIRST:
        begins, _, above, _ = _take_digit(
            sums_ptr, codes_ptr, aboves_ptr, wanted_ptr, step - 1, row, num_rows, num_parts,
            PARTS, IS_SHARE,
        )  # fmt: skip
        if part == 0:
            at = (step - 1) * num_rows + row
            tl.store(codes_ptr + at, begins.to(tl.int32, bitcast=True))
            tl.store(aboves_ptr + at, above)
    peak = 0.0
    if IS_SHARE:
        peak = _peak(peaks_ptr, row, num_parts, PARTS)
    digits = tl.arange(0, DIGITS)
    masses = tl.zeros([CHUNK, DIGITS], tl.float32)
    counts = tl.zeros([CHUNK, DIGITS], tl.int32)
    logits_ptr += row.to(tl.int64) * vocab_size
    for start in range(part * PART, tl.minimum((part + 1) * PART, vocab_size), CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        code = _code(x) >> shift
        is_among = ids < vocab_size
        if not IS_FIRST:
            is_among = is_among & ((code >> DIGIT_BITS) == begins)
        is_of = is_among[:, None] & ((code & (DIGITS - 1)).to(tl.int32)[:, None] == digits[None, :])
        if IS_SHARE:
            masses += tl.where(is_of, tl.exp(x - peak)[:, None], 0.0)
            counts += is_of.to(tl.int32)
        else:
            masses += is_of.to(tl.float32)
    at = (row * num_parts + part) * DIGITS + digits
    tl.store(sums_ptr + step * num_rows * num_parts * DIGITS + at, tl.sum(masses, 0))
    if IS_SHARE and step == PASSES - 1:
        tl.store(counts_ptr + at, tl.sum(counts, 0))


@triton.jit
def _drop(
    logits_ptr, wanted_ptr, peaks_ptr, sums_ptr, counts_ptr, codes_ptr, aboves_ptr,
    vocab_size, num_parts,
    PART: tl.constexpr, PARTS: tl.constexpr, PASSES: tl.constexpr, IS_SHARE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts): set -inf below the threshold. top-p keeps as many of the tokens at the
    threshold as are still needed, lowest ids first."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    threshold, digit, above, wanted = _take_digit(
        sums_ptr, codes_ptr, aboves_ptr, wanted_ptr, PASSES - 1, row, tl.num_programs(0),
        num_parts, PARTS, IS_SHARE,
    )  # fmt: skip
    ids = part * PART + tl.arange(0, PART)
    inside = ids < vocab_size
    logits_ptr += row.to(tl.int64) * vocab_size
    code = _code(tl.load(logits_ptr + ids, mask=inside, other=0.0))
    is_out = code < threshold
    if IS_SHARE:
        weight = tl.exp(_number(threshold) - _peak(peaks_ptr, row, num_parts, PARTS))
        missing = tl.where(
            weight > 0.0, tl.ceil((wanted - above) / tl.where(weight > 0.0, weight, 1.0)), 1.0
        )
        missing = tl.minimum(tl.maximum(missing, 1.0), 2147483520.0).to(tl.int32)
        parts = tl.arange(0, PARTS)
        at = (row * num_parts + parts) * DIGITS + digit
        seen = tl.sum(tl.load(counts_ptr + at, mask=parts < part, other=0), 0)
        equal = ((code == threshold) & inside).to(tl.int32)
        is_out = is_out | ((equal > 0) & (seen + tl.cumsum(equal, 0) > missing))
    tl.store(logits_ptr + ids, float("-inf"), mask=inside & is_out)


def keep_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> None:
    """See the twin."""
    _keep(logits, top_k, is_share=False)


def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """See the twin. Sums are taken in another order: a set with a probability within rounding of
    top_p may be one token larger."""
    _keep(logits, top_p, is_share=True)


def _keep(logits: torch.Tensor, wanted: torch.Tensor, *, is_share: bool) -> None:
    """wanted [rows]: number of tokens, or if is_share, fraction of the total probability."""
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError("logits are not contiguous float32")
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, PART)
    parts = triton.next_power_of_2(num_parts)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    grid = (num_rows, num_parts)
    digits = DIGITS.value
    sums = empty(PASSES, *grid, digits)
    codes, aboves = empty(PASSES, num_rows, dtype=torch.int32), empty(PASSES, num_rows)
    peaks = counts = None
    if is_share:
        peaks, counts = empty(*grid), empty(*grid, digits, dtype=torch.int32)
        _part_peaks[grid](
            logits, peaks, vocab_size, num_parts, PART=PART, num_warps=8, enable_fp_fusion=False
        )
    found = wanted, peaks, sums, counts, codes, aboves, vocab_size, num_parts
    for step in range(PASSES):
        _add_up_digits[grid](
            logits, *found, step, PART=PART, CHUNK=CHUNK, PARTS=parts, PASSES=PASSES,
            IS_FIRST=step == 0, IS_SHARE=is_share, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    _drop[grid](
        logits, *found, PART=PART, PARTS=parts, PASSES=PASSES, IS_SHARE=is_share, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
