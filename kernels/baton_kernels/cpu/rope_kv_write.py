"""baton_kernels.rope_kv_write in native code."""

from __future__ import annotations

import ctypes

import torch

from baton_kernels.cpu.calling import NATIVE_DTYPES, STORED_NUMBERS
from baton_kernels.cpu.library import loaded
from baton_kernels.kv_write import head_stride
from baton_kernels.layer import Norm
from baton_kernels.rope_kv_write import norm_heads
from baton_kernels.rope_kv_write import rope_kv_write as op

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class RopeKvWriteCall(ctypes.Structure):
    """`RopeKvWrite` of calls.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "key", "value")),
        *((name, _LONG) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, _POINTER) for name in ("cos", "sin", "out", "key_out", "pool", "scales")),
        *((name, _LONG) for name in ("stored", "row_bytes", "head_bytes")),
        ("rows", _POINTER),
        ("row_stride", _LONG),
        *((name, _LONG) for name in ("to_layer", "to_values")),
        *((name, _LONG) for name in ("tokens", "heads", "kv_heads", "dim", "block_size")),
    )


def call_over(
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    row_stride: int,
) -> RopeKvWriteCall:
    """Arguments common to the calls of a step. The pool's dtype must have a stored_number.

    rows: the tokens' rows of the first head, row_stride elements apart.
    """
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    return RopeKvWriteCall(
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        pool=pool.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        stored=STORED_NUMBERS.get(pool.dtype),
        row_bytes=head_dim * pool.itemsize,
        head_bytes=head_stride(pool) * pool.itemsize,
        rows=rows.data_ptr(),
        row_stride=row_stride,
        to_values=num_kv_heads * block_size,
        kv_heads=num_kv_heads,
        dim=head_dim,
        block_size=block_size,
    )


def rope_kv_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    scales: torch.Tensor | None = None,
    q_norm: Norm[torch.Tensor] | None = None,
    k_norm: Norm[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin."""
    query, key = norm_heads(query, q_norm), norm_heads(key, k_norm)
    head_dim = query.shape[2]
    has_dense_heads = all(x.stride()[1:] == (head_dim, 1) for x in (query, key, value))
    is_stored = pool.dtype in STORED_NUMBERS
    if query.dtype not in NATIVE_DTYPES or not is_stored or not has_dense_heads:
        return op.twin(query, key, value, cos, sin, pool, layer, rows, scales)
    out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    call = call_over(pool, scales, cos, sin, rows, pool.shape[3])
    call.query, call.key, call.value = (x.data_ptr() for x in (query, key, value))
    call.query_stride, call.key_stride, call.value_stride = (
        x.stride(0) for x in (query, key, value)
    )
    call.out, call.key_out = out.data_ptr(), key_out.data_ptr()
    call.to_layer = layer * 2 * call.to_values
    call.tokens, call.heads = query.shape[:2]
    loaded().baton_rope_kv_write(
        ctypes.addressof(call), STORED_NUMBERS.get(query.dtype), torch.get_num_threads()
    )
    return out, key_out
