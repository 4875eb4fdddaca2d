"""Random batches over a paged KV pool, and reference attention over them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.types import KEY_VALUE, LATENT, KvLayout
from baton_kernels.paged_attention import NO_TERMS, AttentionSlice, ScoreTerms
from engine.kv.tensors.paged import TorchKvPool

_NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Sequences with KV in `pool` at `layer`; slots that no token wrote are NaN.

    query [tokens, heads, head_dim]; key, value [tokens, kv_heads, head_dim or value_dim] of the new
    tokens; history: each sequence's keys and values [length, kv_heads, ...], including new tokens.
    All have the pool's dtype.
    """

    slices: tuple[AttentionSlice, ...]
    pool: torch.Tensor
    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    history: tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """Size of values that are the beginning of keys, in a pool of one part; None if values are
    separate."""


def make_paged_batch(
    lengths: Sequence[tuple[int, int]],
    heads: Heads,
    block_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    num_layers: int = 2,
    is_shuffled: bool = True,
) -> PagedBatch:
    """lengths: (cached tokens, new tokens) per sequence. Tensors are on the generator's device."""
    device = generator.device

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    widths = [-(-(cached + new) // block_size) for cached, new in lengths]
    num_blocks, layer = sum(widths), num_layers - 1
    num_parts = 2 if heads.value_dim is None else 1
    shape = (num_blocks, num_layers, num_parts, heads.num_kv_heads, block_size, heads.head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
    order = (
        torch.randperm(num_blocks, generator=generator, device=device)
        if is_shuffled
        else torch.arange(num_blocks, device=device)
    )
    slices, history, queries = [], [], []
    first_row = first_block = 0
    for (cached, new), width in zip(lengths, widths, strict=True):
        table = order[first_block : first_block + width]
        kv = [randn(cached + new, heads.num_kv_heads, heads.head_dim) for _ in range(num_parts)]
        for kind, tokens in enumerate(kv):
            _fill(pool, table, layer, kind, tokens)
        history.append((kv[0], kv[-1][..., : heads.value_dim]))
        queries.append(randn(new, heads.num_heads, heads.head_dim))
        slices.append(AttentionSlice(first_row, new, cached, table.tolist()))
        first_row += new
        first_block += width
    news = [new for _, new in lengths]
    key, value = (
        torch.cat([kv[kind][-new:] for kv, new in zip(history, news, strict=True)])
        for kind in range(2)
    )
    return PagedBatch(tuple(slices), pool, layer, torch.cat(queries), key, value, tuple(history))


def _fill(
    pool: torch.Tensor, table: torch.Tensor, layer: int, kind: int, tokens: torch.Tensor
) -> None:
    """Write tokens [length, kv_heads, head_dim] into the blocks of a table."""
    block_size = pool.shape[4]
    at = torch.arange(len(tokens), device=pool.device)
    pool[table[at // block_size], layer, kind, :, at % block_size] = tokens


def in_one_memory(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a pool in the engine's layout: views of one memory, with scales between
    the codes."""
    num_blocks, num_layers, num_parts, num_kv_heads, block_size, head_dim = codes.shape
    layout = KvLayout(
        *("bench", num_layers, num_kv_heads, head_dim, _NAMES[codes.dtype], block_size),
        parts=KEY_VALUE if num_parts == 2 else LATENT,
    )
    kv = TorchKvPool(layout, num_blocks, codes.device)
    if kv.scales is None:
        raise ValueError(f"a pool of {layout.dtype} has no scales")
    kv.tensor.copy_(codes)
    kv.scales.copy_(scales)
    return kv.tensor, kv.scales


def reference_attention(
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    terms: ScoreTerms = NO_TERMS,
) -> torch.Tensor:
    """Attention outputs [tokens, heads, head_dim] float64. Quadratic in memory: for short
    sequences."""
    parts = []
    for part, (keys, values) in zip(batch.slices, batch.history, strict=True):
        query = batch.query[part.first_row : part.first_row + part.num_tokens].double()
        group = query.shape[1] // keys.shape[1]
        wide_keys, wide_values = (
            x.double().repeat_interleave(group, dim=1) for x in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", query, wide_keys) * scale
        if terms.softcap is not None:
            scores = terms.softcap * torch.tanh(scores / terms.softcap)
        at = torch.arange(len(keys), device=query.device)
        distance = at[None, :] - (part.start + torch.arange(len(query), device=at.device))[:, None]
        if terms.slopes is not None:
            scores += terms.slopes.double()[:, None, None] * distance
        hidden = distance > 0
        if window is not None:
            hidden |= distance <= -window
        scores = scores.masked_fill(hidden, float("-inf"))
        if terms.sinks is not None:
            sinks = terms.sinks.double()[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[:, :, : len(keys)]
        parts.append(torch.einsum("hqk,khd->qhd", weights, wide_values))
    return torch.cat(parts)
