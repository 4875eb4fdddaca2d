"""Converts KV of a token range between the element types of pool and payload: see the twin.

    float:       value
    run scales:  codes of a head's run, times one scale = max(|values|, LEAST_PEAK) / LIMIT
    row scales:  the same for each token of a head

A program handles one head of one run, [tokens, head_dim] at once. Rounding uses integer operations
and additions that no compiler reorders, and divisions are IEEE, so that results are bit-identical
to the host's. Scales in a payload are unaligned and moved byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from baton_kernels import quantize_rows as twins
from baton_kernels.gpu.quantize_rows import magnitude
from baton_kernels.kv_convert import DTYPES, Conversion
from baton_kernels.kv_pack import Runs
from baton_kernels.quantize_rows import LIMITS

_LEAST_PEAK = tl.constexpr(twins.LEAST_PEAK)
_UP = tl.constexpr(2.0**120)
_DOWN = tl.constexpr(2.0**-120)
_HALF_EVEN = tl.constexpr(1.5 * 2.0**23)
#: Forms of elements and scales, as listed above.
_FLOAT, _RUN_SCALES, _ROW_SCALES = 0, 1, 2
FLOAT = tl.constexpr(_FLOAT)
RUN_SCALES = tl.constexpr(_RUN_SCALES)
_POINTERS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit
def _values(bits, KIND: tl.constexpr):
    """Decode element bits to float32."""
    if KIND == "float32":
        values = bits.to(tl.float32, bitcast=True)
    elif KIND == "bfloat16":
        values = ((bits.to(tl.uint32) & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    elif KIND == "float16":
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "int8":
        values = bits.to(tl.float32)
    else:
        code = bits.to(tl.uint32) & 0xFF
        # Scaled by 2^-120, a float32 has the exponent bits of its fp8, subnormals included.
        size = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * _UP
        size = tl.where((code & 0x7F) == 0x7F, float("nan"), size)
        values = tl.where((code & 0x80) != 0, -size, size)
    return values


@triton.jit
def _bits(values, KIND: tl.constexpr):
    """Bits of the nearest element. Codes must be within their limits."""
    if KIND == "float32":
        nearest = values.to(tl.int32, bitcast=True)
    elif KIND == "bfloat16":
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
        nearest = tl.where(tl.abs(values) >= 0.0, rounded, 0x7FC0).to(tl.uint16)
    elif KIND == "float16":
        nearest = values.to(tl.float16).to(tl.uint16, bitcast=True)
    elif KIND == "int8":
        nearest = ((values + _HALF_EVEN) - _HALF_EVEN).to(tl.int8)
    else:
        bits = (values * _DOWN).to(tl.uint32, bitcast=True)
        rounded = (bits + ((bits >> 20) & 1) + 0x7FFFF) >> 20
        nearest = ((rounded & 0x7F) | ((rounded >> 4) & 0x80)).to(tl.uint8)
    return nearest


@triton.jit
def _load_scale(ptr, there):
    """Load a float32 scale. ptr: uint8, its first byte."""
    bits = tl.load(ptr, mask=there, other=0).to(tl.uint32)
    bits |= tl.load(ptr + 1, mask=there, other=0).to(tl.uint32) << 8
    bits |= tl.load(ptr + 2, mask=there, other=0).to(tl.uint32) << 16
    bits |= tl.load(ptr + 3, mask=there, other=0).to(tl.uint32) << 24
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store_scale(ptr, scale, there):
    bits = scale.to(tl.uint32, bitcast=True)
    tl.store(ptr, (bits & 0xFF).to(tl.uint8), mask=there)
    tl.store(ptr + 1, ((bits >> 8) & 0xFF).to(tl.uint8), mask=there)
    tl.store(ptr + 2, ((bits >> 16) & 0xFF).to(tl.uint8), mask=there)
    tl.store(ptr + 3, (bits >> 24).to(tl.uint8), mask=there)


@triton.jit
def _load(ptr, inside, scale_ptr, there, KIND: tl.constexpr, FORM: tl.constexpr):
    values = _values(tl.load(ptr, mask=inside, other=0), KIND)
    if FORM != FLOAT:
        values = values * _load_scale(scale_ptr, there)[:, None]
    return values


@triton.jit
def _store(
    ptr, values, inside, scale_ptr, there, KIND: tl.constexpr, FORM: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Store elements. For RUN_SCALES the scale of the run is in the first row."""
    if FORM != FLOAT:
        peaks = tl.max(tl.where(inside, magnitude(values), 0.0), 1)
        if FORM == RUN_SCALES:
            peaks = tl.zeros_like(peaks) + tl.max(peaks, 0)
            there = there & (tl.arange(0, peaks.shape[0]) == 0)
        scales = tl.div_rn(tl.maximum(peaks, _LEAST_PEAK), tl.zeros_like(peaks) + LIMIT)
        is_finite = peaks < float("inf")
        _store_scale(scale_ptr, tl.where(is_finite, scales, float("nan")), there)
        inverse = tl.where(is_finite, tl.div_rn(tl.zeros_like(scales) + 1.0, scales), 0.0)
        values = tl.where(is_finite[:, None], values, 0.0) * inverse[:, None]
    tl.store(ptr, _bits(values, KIND), mask=inside)


@triton.jit(do_not_specialize=["first_token", "num_tokens", "run_tokens", "first_head"])
def _convert(
    pool_ptr, pool_bytes_ptr, payload_ptr, payload_bytes_ptr, table_ptr,
    first_token, num_tokens, run_tokens, block_heads, first_head, head_bytes,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
    POOL: tl.constexpr, POOL_FORM: tl.constexpr, POOL_LIMIT: tl.constexpr,
    POOL_ITEM: tl.constexpr,
    WIRE: tl.constexpr, WIRE_FORM: tl.constexpr, WIRE_LIMIT: tl.constexpr,
    ENCODE: tl.constexpr,
):  # fmt: skip
    """Grid (runs, layers * parts * kv_heads). Byte pointers are used for scales."""
    run, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    run_first = tl.maximum((first_token // run_tokens + run) * run_tokens, first_token)
    run_end = tl.minimum(
        (first_token // run_tokens + run + 1) * run_tokens, first_token + num_tokens
    )
    count = run_end - run_first
    rows, dims = tl.arange(0, TOKENS), tl.arange(0, BLOCK_D)
    there = rows < count
    inside = there[:, None] & (dims < HEAD_DIM)[None, :]
    at = run_first + rows
    block = tl.load(table_ptr + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    group = (block * block_heads + first_head + head) * head_bytes
    in_pool = (group // POOL_ITEM + at % BLOCK_SIZE * HEAD_DIM)[:, None] + dims[None, :]
    pool_scales = group + BLOCK_SIZE * HEAD_DIM + at % BLOCK_SIZE * 4
    before = (run_first - first_token).to(tl.int64) * num_heads
    if WIRE_FORM == FLOAT:
        first = (before + head * count) * HEAD_DIM
        scales = rows
    elif WIRE_FORM == RUN_SCALES:
        start = before * HEAD_DIM + run * num_heads * 4
        first = start + num_heads * 4 + head * count * HEAD_DIM
        scales = start + head * 4 + rows * 0
    else:
        first = (before + head * count) * (HEAD_DIM + 4)
        scales = first + count * HEAD_DIM + rows * 4
    in_payload = first + rows[:, None] * HEAD_DIM + dims[None, :]
    if ENCODE:
        values = _load(
            pool_ptr + in_pool, inside, pool_bytes_ptr + pool_scales, there, POOL, POOL_FORM
        )
        _store(
            payload_ptr + in_payload, values, inside, payload_bytes_ptr + scales, there,
            WIRE, WIRE_FORM, WIRE_LIMIT,
        )  # fmt: skip
    else:
        values = _load(
            payload_ptr + in_payload, inside, payload_bytes_ptr + scales, there, WIRE, WIRE_FORM
        )
        _store(
            pool_ptr + in_pool, values, inside, pool_bytes_ptr + pool_scales, there,
            POOL, POOL_FORM, POOL_LIMIT,
        )  # fmt: skip


def kv_encode(
    blocks: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    runs: Runs,
    conversion: Conversion,
    payload: torch.Tensor,
) -> None:
    """See the twin. block_ids may be an int32 tensor on the device."""
    _launch(blocks, block_ids, runs, conversion, payload, is_encode=True)


def kv_decode(
    blocks: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    runs: Runs,
    conversion: Conversion,
    payload: torch.Tensor,
) -> None:
    """See the twin. block_ids may be an int32 tensor on the device."""
    _launch(blocks, block_ids, runs, conversion, payload, is_encode=False)


def _launch(
    blocks: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    runs: Runs,
    conversion: Conversion,
    payload: torch.Tensor,
    *,
    is_encode: bool,
) -> None:
    _, num_layers, num_parts, num_kv_heads, head_bytes = blocks.shape
    layer_heads = num_parts * num_kv_heads
    pool_dtype, wire_dtype = (
        DTYPES[name] for name in (conversion.pool_dtype, conversion.wire_dtype)
    )
    wire_form = _ROW_SCALES if conversion.has_row_scales else _RUN_SCALES
    table = torch.as_tensor(block_ids, dtype=torch.int32, device=blocks.device)
    end = runs.first_token + runs.num_tokens
    num_runs = triton.cdiv(end, runs.run_tokens) - runs.first_token // runs.run_tokens
    elements = payload if wire_dtype in LIMITS else payload.view(_POINTERS[wire_dtype.itemsize])
    _convert[(num_runs, runs.num_layers * layer_heads)](
        blocks.view(_POINTERS[pool_dtype.itemsize]), blocks, _codes(elements, wire_dtype), payload,
        table, runs.first_token, runs.num_tokens, runs.run_tokens,
        num_layers * layer_heads, runs.first_layer * layer_heads, head_bytes,
        BLOCK_SIZE=conversion.block_size(blocks), HEAD_DIM=conversion.head_dim,
        BLOCK_D=triton.next_power_of_2(conversion.head_dim),
        TOKENS=triton.next_power_of_2(runs.run_tokens),
        POOL=conversion.pool_dtype, POOL_FORM=_ROW_SCALES if pool_dtype in LIMITS else _FLOAT,
        POOL_LIMIT=LIMITS.get(pool_dtype, 1.0), POOL_ITEM=pool_dtype.itemsize,
        WIRE=conversion.wire_dtype, WIRE_FORM=wire_form if wire_dtype in LIMITS else _FLOAT,
        WIRE_LIMIT=LIMITS.get(wire_dtype, 1.0), ENCODE=is_encode,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _codes(elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return elements.view(torch.int8) if dtype in LIMITS else elements
