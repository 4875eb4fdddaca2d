"""Linear layers with quantised weights: y = x W^T (+ bias) (+ residual), W [out, in] kept as levels
or codes.

    int:  W[o, i] = (level[o, i] - zero[g, o]) * scale[g, o]
          levels of 4 or 8 bits in runs of inputs: see IntWeight
    fp8:  W[o, i] = code[o, i] * scale[g, o]
          codes [out, in] float8, and x in float8 with x_scales [rows, groups]

Level minus zero is a small integer, exact in the dtype of x: it is multiplied unscaled, and the
scale is applied to the sum of each run. A program computes a tile of BLOCK_M rows by BLOCK_N
outputs; the number of rows sets its size, and each sum runs over the inputs in order. If few rows
give too few programs, the inputs are split as well (split-K), and another kernel adds the parts in
order; the number of parts depends on the layer's shape and the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.epilogue import finish
from baton_kernels.gpu.block_scaled_mm import (
    GROUP_SIZE,
    ROWS_MULTIPLE,
    block_scaled_mm,
    has_block_scaled_mm,
)
from baton_kernels.gpu.quantize_rows import quantize_rows
from baton_kernels.quantized_linear import IntWeight

#: Programs wanted for a product of few rows: several per multiprocessor of a large GPU.
_WANTED_PROGRAMS = 512
#: Maximum rows of a product with split inputs; all of them fit one tile.
_MAX_SPLIT_ROWS = 64
#: Minimum runs per program with split inputs.
_LEAST_RUNS = 4
#: Outputs per program that adds the parts.
_ADDED_OUTPUTS = 512
#: Above this number of rows torch's float8 product runs, where there is one.
_MAX_OWN_FP8_ROWS = 16
#: Minimum compute capability at which torch's product takes a scale per row, and its required sizes
#: and result types.
_SCALED_MM_CAPABILITY = (9, 0)
_SCALED_MM_MULTIPLE = 16
_SCALED_MM_DTYPE = torch.bfloat16


@triton.jit
def _finish(
    acc, rows, outs, num_rows, num_out, bias_ptr, residual_ptr, y_ptr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    inside = (rows < num_rows)[:, None] & (outs < num_out)[None, :]
    at = rows[:, None].to(tl.int64) * num_out + outs[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outs, mask=outs < num_out, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts(
    parts_ptr, bias_ptr, residual_ptr, y_ptr, num_rows, num_out,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles of outputs): y = the parts [SPLITS, rows, out] float32 added in order."""
    rows = tl.program_id(0) + tl.arange(0, 1)
    outs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (outs < num_out)[None, :]
    at = rows[:, None].to(tl.int64) * num_out + outs[None, :]
    acc = tl.zeros([1, BLOCK], dtype=tl.float32)
    for split in range(SPLITS):
        part = parts_ptr + tl.cast(split, tl.int64) * num_rows * num_out
        acc += tl.load(part + at, mask=inside, other=0.0)
    _finish(
        acc, rows, outs, num_rows, num_out, bias_ptr, residual_ptr, y_ptr, HAS_BIAS, HAS_RESIDUAL
    )


@triton.jit
def _int_linear(
    x_ptr, levels_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, y_ptr,
    num_rows, num_out, num_in, group_size, x_stride,
    BITS: tl.constexpr, RUN: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, output tiles, SPLITS). Each loop step handles one run; 4-bit runs have their
    first half in the low nibbles and the second in the high. BLOCK_K: bytes of levels in a run,
    padded to a power of two. y: with several SPLITS, the parts [SPLITS, rows, out] float32."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ins = tl.arange(0, BLOCK_K)
    RUN_BYTES: tl.constexpr = RUN * BITS // 8
    x_inside = (rows < num_rows)[:, None] & (ins < RUN_BYTES)[None, :]
    w_inside = (outs < num_out)[:, None] & (ins < RUN_BYTES)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    x_at = x_ptr + rows[:, None].to(tl.int64) * x_stride + ins[None, :]
    w_at = levels_ptr + outs[:, None].to(tl.int64) * (num_in * BITS // 8) + ins[None, :]
    num_steps = num_in // RUN
    of_split = tl.cdiv(num_steps, SPLITS)
    first = tl.program_id(2) * of_split
    for step in range(first, tl.minimum(first + of_split, num_steps)):
        group = step * RUN // group_size
        scale = tl.load(scales_ptr + group * num_out + outs, mask=outs < num_out, other=0.0)
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + group * num_out + outs, mask=outs < num_out, other=0)
            zero = zero.to(tl.int32)[:, None]
        else:
            zero = 1 << (BITS - 1)
        x = tl.load(x_at + step * RUN, mask=x_inside, other=0.0)
        levels = tl.load(w_at + step * RUN_BYTES, mask=w_inside, other=0)
        if BITS == 8:
            part = tl.dot(
                x, tl.trans((levels.to(tl.int32) - zero).to(x.dtype)), input_precision="ieee"
            )
        else:
            x_high = tl.load(x_at + step * RUN + RUN_BYTES, mask=x_inside, other=0.0)
            low = ((levels & 15).to(tl.int32) - zero).to(x.dtype)
            high = ((levels >> 4).to(tl.int32) - zero).to(x.dtype)
            part = tl.dot(x, tl.trans(low), input_precision="ieee")
            part = tl.dot(x_high, tl.trans(high), part, input_precision="ieee")
        acc += part * scale[None, :]
    y_ptr += tl.program_id(2).to(tl.int64) * num_rows * num_out
    _finish(
        acc, rows, outs, num_rows, num_out, bias_ptr, residual_ptr, y_ptr, HAS_BIAS, HAS_RESIDUAL
    )


@triton.jit
def _fp8_linear(
    x_ptr, codes_ptr, x_scales_ptr, scales_ptr, bias_ptr, residual_ptr, y_ptr,
    num_rows, num_out, num_in, num_groups,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_GROUPED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, output tiles, SPLITS). Each loop step handles BLOCK_K inputs; if IS_GROUPED
    they are one group: its sum is scaled and added in float32. y: see _int_linear."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ins = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    x_at = x_ptr + rows[:, None].to(tl.int64) * num_in + ins[None, :]
    w_at = codes_ptr + outs[:, None].to(tl.int64) * num_in + ins[None, :]
    num_steps = tl.cdiv(num_in, BLOCK_K)
    of_split = tl.cdiv(num_steps, SPLITS)
    first = tl.program_id(2) * of_split
    for step in range(first, tl.minimum(first + of_split, num_steps)):
        start = step * BLOCK_K
        there = (start + ins < num_in)[None, :]
        x = tl.load(x_at + start, mask=there & (rows < num_rows)[:, None], other=0.0)
        w = tl.load(w_at + start, mask=there & (outs < num_out)[:, None], other=0.0)
        if IS_GROUPED:
            x_scale = tl.load(
                x_scales_ptr + rows * num_groups + step, mask=rows < num_rows, other=0.0
            )
            scale = tl.load(scales_ptr + step * num_out + outs, mask=outs < num_out, other=0.0)
            acc += tl.dot(x, tl.trans(w)) * x_scale[:, None] * scale[None, :]
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    if not IS_GROUPED:
        acc *= tl.load(scales_ptr + outs, mask=outs < num_out, other=0.0)[None, :]
        acc *= tl.load(x_scales_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    y_ptr += tl.program_id(2).to(tl.int64) * num_rows * num_out
    _finish(
        acc, rows, outs, num_rows, num_out, bias_ptr, residual_ptr, y_ptr, HAS_BIAS, HAS_RESIDUAL
    )


def int_linear(
    x: torch.Tensor,
    weight: IntWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See the twin. x's rows, bias and residual must be contiguous."""
    num_rows, num_in = x.shape
    run, num_out = weight.run, weight.num_out
    block_m, block_n, _, num_warps = _tile(num_rows)
    # Both halves of a run are in registers at once.
    block_n = min(64, block_n)
    y = torch.empty(num_rows, num_out, dtype=out_dtype or x.dtype, device=x.device)
    splits = num_splits(num_rows, num_out, num_in // run)
    to = y if splits == 1 else x.new_empty(splits, num_rows, num_out, dtype=torch.float32)
    _int_linear[(triton.cdiv(num_rows, block_m), triton.cdiv(num_out, block_n), splits)](
        x, weight.levels, weight.scales, weight.zeros, bias, residual, to,
        num_rows, num_out, num_in, num_in // weight.scales.shape[0], x.stride(0),
        BITS=weight.bits, RUN=run, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=max(16, triton.next_power_of_2(run * weight.bits // 8)),
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None and splits == 1,
        HAS_RESIDUAL=residual is not None and splits == 1,
        num_warps=num_warps, num_stages=4, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        _add(to, bias, residual, y)
    return y


def _add(
    parts: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, y: torch.Tensor
) -> None:
    """y = parts [splits, rows, out] (+ bias) (+ residual)."""
    splits, num_rows, num_out = parts.shape
    _add_parts[(num_rows, triton.cdiv(num_out, _ADDED_OUTPUTS))](
        parts, bias, residual, y, num_rows, num_out, SPLITS=splits, BLOCK=_ADDED_OUTPUTS,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def num_splits(num_rows: int, num_out: int, num_runs: int) -> int:
    """Number of parts (a power of two) into which a layer's inputs, of so many runs or steps, are
    split; 1 if the outputs give enough programs. Equal for all numbers of rows with the same
    tile."""
    if num_rows > _MAX_SPLIT_ROWS:
        return 1
    _, block_n, _, _ = _tile(num_rows)
    wanted = _WANTED_PROGRAMS // int(triton.cdiv(num_out, block_n))
    return 1 << max(0, min(wanted, num_runs // _LEAST_RUNS).bit_length() - 1)


def fp8_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See the twin. All must be contiguous."""
    num_rows, num_in = x.shape
    num_groups, num_out = scales.shape
    x_codes, x_scales = quantize_rows(x.view(num_rows, num_groups, -1), codes.dtype)
    x_codes = x_codes.view(x.shape)
    if _takes_scaled_mm(x, codes, num_groups, out_dtype):
        y = torch._scaled_mm(
            x_codes, codes.t(), scale_a=x_scales, scale_b=scales, bias=bias, out_dtype=x.dtype
        )
        return finish(y, residual, out_dtype)
    if _takes_block_scaled_mm(x, codes, num_groups, out_dtype):
        y = block_scaled_mm(x_codes, x_scales, codes, scales)
        return finish(y if bias is None else y.add_(bias), residual, out_dtype)
    block_m, block_n, block_k, num_warps = _tile(num_rows)
    if num_groups > 1:
        block_k = num_in // num_groups
    y = torch.empty(num_rows, num_out, dtype=out_dtype or x.dtype, device=x.device)
    splits = num_splits(num_rows, num_out, int(triton.cdiv(num_in, block_k)))
    to = y if splits == 1 else x.new_empty(splits, num_rows, num_out, dtype=torch.float32)
    _fp8_linear[(triton.cdiv(num_rows, block_m), triton.cdiv(num_out, block_n), splits)](
        x_codes, codes, x_scales, scales, bias, residual, to, num_rows, num_out, num_in,
        num_groups, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        IS_GROUPED=num_groups > 1, HAS_BIAS=bias is not None and splits == 1,
        HAS_RESIDUAL=residual is not None and splits == 1,
        num_warps=num_warps, num_stages=4, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        _add(to, bias, residual, y)
    return y


def _takes_scaled_mm(
    x: torch.Tensor, codes: torch.Tensor, num_groups: int, out_dtype: torch.dtype | None
) -> bool:
    """Whether torch's own product runs this one: many rows, one scale per row, and a size that its
    libraries support."""
    is_fit = num_groups == 1 and all(size % _SCALED_MM_MULTIPLE == 0 for size in codes.shape)
    is_known = x.dtype == _SCALED_MM_DTYPE and out_dtype in (None, x.dtype)
    return is_fit and is_known and len(x) > _MAX_OWN_FP8_ROWS and has_scaled_mm(x.device)


def _takes_block_scaled_mm(
    x: torch.Tensor, codes: torch.Tensor, num_groups: int, out_dtype: torch.dtype | None
) -> bool:
    """The same, with a scale for each 128 inputs."""
    is_fit = num_groups > 1 and codes.shape[1] == num_groups * GROUP_SIZE
    is_fit = is_fit and codes.shape[0] % _SCALED_MM_MULTIPLE == 0 == len(x) % ROWS_MULTIPLE
    is_known = x.dtype == _SCALED_MM_DTYPE and out_dtype in (None, x.dtype)
    return is_fit and is_known and len(x) > _MAX_SPLIT_ROWS and has_block_scaled_mm(x.device)


def has_scaled_mm(device: torch.device) -> bool:
    """Whether torch multiplies float8 with a scale per row and per output on the device."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _SCALED_MM_CAPABILITY


def _tile(num_rows: int) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K and warps: many small programs for few rows, where reading weights
    dominates; large ones for many rows."""
    if num_rows <= 16:
        return 16, 32, 128, 4
    if num_rows <= 64:
        return 64, 32, 128, 4
    return 128, 128, 64, 8
