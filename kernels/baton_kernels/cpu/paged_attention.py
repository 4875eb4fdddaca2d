"""baton_kernels.paged_attention in native code: KV is read in place, and a row's result does not
depend on the batch."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from baton_kernels.cpu.calling import NATIVE_DTYPES, STORED_NUMBERS
from baton_kernels.cpu.library import loaded
from baton_kernels.kv_write import head_stride
from baton_kernels.paged_attention import NO_TERMS, AttentionSlice, PlacedTables, ScoreTerms
from baton_kernels.paged_attention import AttentionPlan as TwinPlan
from baton_kernels.paged_attention import paged_attention as attention_op
from baton_kernels.paged_attention import plan_attention as plan_op

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
#: Same value as in attention_tasks.h.
_TASK_ROWS = 64
MAX_HEAD_DIM = 576


class _Call(ctypes.Structure):
    """`Attention` of calls.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "out", "pool", "scales")),
        *((name, _LONG) for name in ("stored", "row_bytes", "head_bytes")),
        *((name, _LONG) for name in ("layer", "num_layers", "parts", "heads", "kv_heads")),
        *((name, _LONG) for name in ("block_size", "dim")),
        ("scale", ctypes.c_float),
        *((name, _LONG) for name in ("window", "num_seqs")),
        *((name, _POINTER) for name in ("first_row", "num_tokens", "start")),
        *((name, _POINTER) for name in ("tables", "table_at", "task_at")),
        ("softcap", ctypes.c_float),
        *((name, _POINTER) for name in ("sinks", "slopes")),
    )


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Sequences of a step, for the layers with one window. call: arguments except query, out,
    scales, layer and the layer's terms.

    numbers: keeps the arrays alive that `call` points into.
    """

    call: _Call
    numbers: array[int]


def plan_attention(
    slices: Sequence[AttentionSlice],
    pool: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int | None,
    dtype: torch.dtype | None = None,
    placed: PlacedTables | None = None,  # noqa: ARG001
) -> AttentionPlan | TwinPlan:
    """See the twin."""
    head_dim = pool.shape[5]
    dtype, stored = dtype or pool.dtype, STORED_NUMBERS.get(pool.dtype)
    if dtype not in NATIVE_DTYPES or stored is None or head_dim > MAX_HEAD_DIM:
        return plan_op.twin(slices, pool, num_heads, scale, window, dtype)
    _, num_layers, num_parts, num_kv_heads, block_size, _ = pool.shape
    # Arrays first_row, num_tokens, start, table_at, task_at and tables, concatenated.
    first_rows, counts, starts, block_tables = zip(*slices, strict=True)
    group = num_heads // num_kv_heads
    tasks = (-(-count * group // _TASK_ROWS) * num_kv_heads for count in counts)
    numbers = array("q", (*first_rows, *counts, *starts))
    numbers.extend(accumulate(map(len, block_tables[:-1]), initial=0))
    numbers.extend(accumulate(tasks, initial=0))
    for table in block_tables:
        numbers.extend(table)
    address, row = numbers.buffer_info()[0], numbers.itemsize * len(slices)
    first_row, num_tokens, start, table_at, task_at = range(address, address + 5 * row, row)
    tables = task_at + row + numbers.itemsize
    return AttentionPlan(
        _Call(
            *(None, None, pool.data_ptr(), None),
            *(stored, head_dim * pool.itemsize, head_stride(pool) * pool.itemsize),
            *(0, num_layers, num_parts, num_heads, num_kv_heads),
            *(block_size, head_dim, scale, window or 0, len(slices)),
            *(first_row, num_tokens, start, tables, table_at, task_at),
        ),
        numbers,
    )


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: AttentionPlan | TwinPlan,
    scales: torch.Tensor | None = None,
    terms: ScoreTerms = NO_TERMS,
) -> torch.Tensor:
    """See the twin."""
    if isinstance(plan, TwinPlan):
        return attention_op.twin(query, key, value, pool, layer, plan, scales, terms)
    query = query.contiguous()
    out = torch.empty_like(query)
    call = plan.call
    call.query, call.out, call.layer = query.data_ptr(), out.data_ptr(), layer
    call.scales = None if scales is None else scales.data_ptr()
    call.softcap = terms.softcap or 0.0
    call.sinks = None if terms.sinks is None else terms.sinks.data_ptr()
    call.slopes = None if terms.slopes is None else terms.slopes.data_ptr()
    loaded().baton_attention(
        ctypes.addressof(call), STORED_NUMBERS.get(query.dtype), torch.get_num_threads()
    )
    # A pool of one part sums whole rows; the value is their beginning.
    return out[..., : value.shape[2]]
