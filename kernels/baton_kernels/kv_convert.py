"""Pack or unpack the KV of a token range and convert it between the element types of pool and
payload.

A payload is a sequence of runs (see baton_kernels.kv_pack.Runs), each [layers, parts, kv_heads,
tokens, head_dim] elements of the payload's type. 8-bit payloads have float32 scales in one of two
forms: one scale per head of a run, all before its elements; or, with has_row_scales, one scale per
token of a head, after the head's elements, as in an 8-bit pool. Results are bit-identical to
kv_transfer.transcoder, which defines the rounding, except for NaN payload bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from baton_kernels.dispatch import op
from baton_kernels.kv_pack import Runs
from baton_kernels.quantize_rows import LEAST_PEAK, LIMITS

_SCALE_BYTES = 4
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


class Conversion(NamedTuple):
    """Element types of pool and payload, by their names in DTYPES, and the shape of a row.
    has_row_scales: form of the payload's scales."""

    pool_dtype: str
    wire_dtype: str
    has_row_scales: bool
    head_dim: int

    def block_size(self, blocks: torch.Tensor) -> int:
        """Tokens per block. blocks: see kv_encode."""
        dtype = DTYPES[self.pool_dtype]
        scale_bytes = _SCALE_BYTES if dtype in LIMITS else 0
        return blocks.shape[-1] // (self.head_dim * dtype.itemsize + scale_bytes)


@op
def kv_encode(
    blocks: torch.Tensor,
    block_ids: Sequence[int],
    runs: Runs,
    conversion: Conversion,
    payload: torch.Tensor,
) -> None:
    """Fill `payload`, uint8 [bytes] aligned to 4 bytes, from the blocks.

    blocks: uint8 [blocks, layers, parts, kv_heads, bytes of a block's head], contiguous. In an
    8-bit pool a block's head is codes [block_size, head_dim], then scales [block_size] float32.
    """
    elements, scales = _pool_views(blocks, conversion)
    form = (conversion.wire_dtype, conversion.has_row_scales)
    done = 0
    for tokens in _token_runs(runs):
        at = _places(elements, block_ids, runs, tokens)
        values = elements[at].float()
        if scales is not None:
            values *= scales[at].unsqueeze(-1)
        part = _bytes_of(values.movedim(0, 3).contiguous(), *form)
        payload[done : done + len(part)] = part
        done += len(part)


@op
def kv_decode(
    blocks: torch.Tensor,
    block_ids: Sequence[int],
    runs: Runs,
    conversion: Conversion,
    payload: torch.Tensor,
) -> None:
    """The inverse: write `payload` into the blocks."""
    elements, scales = _pool_views(blocks, conversion)
    _, _, num_parts, num_heads, _ = blocks.shape
    done = 0
    for tokens in _token_runs(runs):
        shape = (runs.num_layers, num_parts, num_heads, len(tokens), conversion.head_dim)
        values, num_bytes = _values_of(payload[done:], shape, conversion)
        done += num_bytes
        at = _places(elements, block_ids, runs, tokens)
        rows = values.movedim(3, 0)
        if scales is None:
            elements[at] = rows.to(elements.dtype)
        else:
            codes, row_scales = _quantized(rows, (-1,), elements.dtype)
            _bits(elements)[at] = _bits(codes)
            scales[at] = row_scales[..., 0]


def _pool_views(
    blocks: torch.Tensor, conversion: Conversion
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Elements [blocks, layers, parts, kv_heads, block_size, head_dim], and the scales of rows or
    None."""
    dtype, size = DTYPES[conversion.pool_dtype], conversion.block_size(blocks)
    num_bytes = size * conversion.head_dim * dtype.itemsize
    rows = (size, conversion.head_dim)
    elements = blocks[..., :num_bytes].view(dtype).unflatten(-1, rows)  # type: ignore[no-untyped-call]
    scales = blocks[..., num_bytes:].view(torch.float32) if dtype in LIMITS else None
    return elements, scales


def _token_runs(runs: Runs) -> Iterator[range]:
    at, end = runs.first_token, runs.first_token + runs.num_tokens
    while at < end:
        border = min((at // runs.run_tokens + 1) * runs.run_tokens, end)
        yield range(at, border)
        at = border


def _places(
    elements: torch.Tensor, block_ids: Sequence[int], runs: Runs, tokens: range
) -> tuple[torch.Tensor | slice, ...]:
    """Index that selects [tokens, layers, parts, kv_heads, ...]."""
    size = elements.shape[4]
    blocks = torch.tensor([block_ids[token // size] for token in tokens], device=elements.device)
    offsets = torch.tensor([token % size for token in tokens], device=elements.device)
    layers = slice(runs.first_layer, runs.first_layer + runs.num_layers)
    return blocks, layers, slice(None), slice(None), offsets


def _bytes_of(values: torch.Tensor, dtype: str, has_row_scales: bool) -> torch.Tensor:
    """Encode a run. values: [layers, parts, kv_heads, tokens, head_dim] float32."""
    target = DTYPES[dtype]
    if target not in LIMITS:
        return values.to(target).view(torch.uint8).flatten()
    codes, scales = _quantized(values, (-1,) if has_row_scales else (-2, -1), target)
    parts = [codes.view(torch.uint8), scales.view(torch.uint8)]
    if has_row_scales:
        return torch.cat([part.flatten(-2) for part in parts], -1).flatten()
    return torch.cat([part.flatten() for part in reversed(parts)])


def _values_of(
    data: torch.Tensor, shape: tuple[int, ...], conversion: Conversion
) -> tuple[torch.Tensor, int]:
    """Decode a run to float32 elements of `shape`; also return the number of bytes of `data`
    read."""
    dtype = DTYPES[conversion.wire_dtype]
    num_heads, num_rows = math.prod(shape[:3]), shape[3]
    num_bytes = math.prod(shape) * dtype.itemsize
    if dtype not in LIMITS:
        return data[:num_bytes].clone().view(dtype).view(shape).float(), num_bytes
    num_scale_bytes = _SCALE_BYTES * num_heads * (num_rows if conversion.has_row_scales else 1)
    end = num_bytes + num_scale_bytes
    if conversion.has_row_scales:
        heads = data[:end].view(*shape[:3], -1)
        head_bytes = num_bytes // num_heads
        codes, scales = heads[..., :head_bytes], heads[..., head_bytes:]
    else:
        scales, codes = data[:num_scale_bytes], data[num_scale_bytes:end]
    wide = codes.clone().view(dtype).view(shape).float()
    return wide * scales.clone().view(torch.float32).view(*shape[:3], -1, 1), end


def _quantized(
    values: torch.Tensor, axes: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and their scales; the scales have size 1 along `axes`."""
    scales = values.abs().amax(axes, keepdim=True).clamp(min=LEAST_PEAK) / LIMITS[dtype]
    is_finite = scales.isfinite()
    codes = torch.where(is_finite, values, 0.0) * torch.where(is_finite, 1 / scales, 0.0)
    codes = codes.round() if dtype == torch.int8 else codes
    return codes.to(dtype), torch.where(is_finite, scales, torch.nan)


def _bits(codes: torch.Tensor) -> torch.Tensor:
    """View float8 codes as integers, which support more operations."""
    return codes.view(torch.int8)
