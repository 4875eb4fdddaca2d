"""Paged attention over pools of each dtype, with each option that a model may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from baton_kernels.gpu import paged_attention
from baton_kernels.gpu.attention_plan import ITEM_FIELDS, WorkList, choose_tile
from baton_kernels.gpu.padded_plan import (
    PlanRoom,
    Sequences,
    empty_partials,
    padded_plan,
    plan_items,
)
from baton_kernels.paged_attention import ScoreTerms
from baton_kernels.quantize_rows import dequantize_rows
from baton_kernels.quantize_rows import quantize_rows as quantize_op
from bench.gpu.case import FP8, Case, Sizes, Trial, relative_error
from bench.gpu.paged_batch import Heads, in_one_memory, make_paged_batch, reference_attention
from engine.torch.device_tables import DeviceTables


@dataclass(frozen=True, slots=True)
class _Attention:
    """Parameters of an attention case. dtype: of the pool, None for the 16-bit one."""

    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    has_slopes: bool = False
    has_sinks: bool = False
    latent_heads: int | None = None
    """Heads of latent attention; values are all but the last 64 elements of a row."""


def _attention(about: _Attention, generator: torch.Generator, sizes: Sizes) -> Trial:
    heads = Heads(*sizes.heads, about.head_dim)
    if about.latent_heads is not None:
        heads = Heads(about.latent_heads, 1, about.head_dim, about.head_dim - 64)
    is_quantised = about.dtype in (torch.int8, FP8)
    dtype = sizes.half if is_quantised or about.dtype is None else about.dtype
    batch = make_paged_batch(sizes.lengths, heads, about.block_size, dtype, generator)
    pool, scales = batch.pool, None
    if is_quantised and about.dtype is not None:
        pool, scales = in_one_memory(*quantize_op.twin(batch.pool, about.dtype))
        rounded = [
            [
                dequantize_rows(*quantize_op.twin(x, about.dtype), torch.float32)
                for x in (kv if heads.value_dim is None else kv[:1])
            ]
            for kv in batch.history
        ]
        batch = replace(
            batch, history=tuple((kv[0], kv[-1][..., : heads.value_dim]) for kv in rounded)
        )
    powers = 2.0 ** -torch.arange(1, heads.num_heads + 1, device=pool.device).float()
    terms = ScoreTerms(
        about.softcap,
        sinks=powers if about.has_sinks else None,
        slopes=powers if about.has_slopes else None,
    )
    scale = about.head_dim**-0.5
    plan = paged_attention.plan_attention(
        batch.slices, pool, heads.num_heads, scale, about.window, dtype
    )
    return Trial(
        lambda: paged_attention.paged_attention(
            *(batch.query, batch.key, batch.value, pool, batch.layer, plan, scales, terms)
        ),
        lambda got: relative_error(got, reference_attention(batch, scale, about.window, terms)),
        2e-5 if dtype == torch.float32 else 1e-2,
    )


def _decode_plan(window: int | None, generator: torch.Generator, sizes: Sizes) -> Trial:
    """Compare items of sequences with one new token made by the device with the host's."""
    heads = Heads(*sizes.heads, 128)
    group = heads.num_heads // heads.num_kv_heads
    lengths = [(cached, 1) for cached, _ in sizes.lengths]
    batch = make_paged_batch(lengths, heads, 16, sizes.half, generator)
    device, tile = batch.pool.device, choose_tile(group, batch.pool, sizes.half)
    work = WorkList(tile, group, window)
    for part in batch.slices:
        work.add(part, 7 * part.first_row)
    columns = [(part.start, 1, 7 * part.first_row) for part in batch.slices]
    sequences = Sequences(*torch.tensor(columns, dtype=torch.int32, device=device).T.contiguous())
    room = PlanRoom(len(work.items) + 3, len(columns))
    fields = torch.full((room.num_fields,), -7, dtype=torch.int32, device=device)
    partials = empty_partials(room.num_items, batch.pool, tile, heads.num_heads)
    plan = padded_plan(fields, fields, room, tile, partials, 1.0, window)

    def run() -> list[tuple[int, ...]]:
        plan_items(sequences, plan)
        return [tuple(item) for item in plan.launches[0].items.tolist()]

    wanted = sorted([*work.items, *[(0,) * ITEM_FIELDS] * 3])
    return Trial(run, lambda got: float(sorted(got) != wanted), 0.0)


def _placed_plan(window: int | None, generator: torch.Generator, sizes: Sizes) -> Trial:
    """A step of a prompt's chunk and decoding sequences, with block tables on the device."""
    heads = Heads(*sizes.heads, 128)
    batch = make_paged_batch(sizes.lengths, heads, 16, sizes.half, generator)
    parts, device, scale = batch.slices, batch.pool.device, 128**-0.5
    tables = DeviceTables(len(parts), max(len(part.block_table) for part in parts), device)
    placed = tables.placed([part.block_table for part in parts])

    def run() -> torch.Tensor:
        plan = paged_attention.plan_attention(
            parts, batch.pool, heads.num_heads, scale, window, sizes.half, placed
        )
        return paged_attention.attend(batch.query, batch.pool, None, batch.layer, plan)

    wanted = reference_attention(batch, scale, window)
    return Trial(run, lambda got: relative_error(got, wanted), 1e-2)


def attention_cases() -> Sequence[Case]:
    """See above."""
    kinds = {
        "bf16": _Attention(),
        "bf16 window": _Attention(window=100),
        "bf16 softcap alibi": _Attention(softcap=20.0, has_slopes=True),
        "bf16 window sinks": _Attention(window=100, has_sinks=True, head_dim=64),
        "bf16 head_dim 64 block 64": _Attention(head_dim=64, block_size=64),
        "bf16 head_dim 256": _Attention(head_dim=256, block_size=32),
        "bf16 head_dim 80": _Attention(head_dim=80),
        "fp16": _Attention(dtype=torch.float16),
        "fp32": _Attention(dtype=torch.float32, head_dim=64),
        "int8": _Attention(dtype=torch.int8),
        "fp8": _Attention(dtype=FP8),
        "latent": _Attention(576, latent_heads=128),
        "latent few heads": _Attention(576, block_size=64, latent_heads=16),
        "latent fp32": _Attention(576, dtype=torch.float32, latent_heads=16),
        "latent int8": _Attention(576, dtype=torch.int8, latent_heads=128),
        "latent fp8": _Attention(576, dtype=FP8, latent_heads=128),
    }
    return (
        [
            Case(f"attention {name}", partial(_attention, about), 89 if about.dtype == FP8 else 80)
            for name, about in kinds.items()
        ]
        + [
            Case(f"decode plan{name}", partial(_decode_plan, window))
            for name, window in (("", None), (" window", 100))
        ]
        + [
            Case(f"placed plan{name}", partial(_placed_plan, window))
            for name, window in (("", None), (" window", 100))
        ]
    )
