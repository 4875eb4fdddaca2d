"""Causal attention of a packed batch over the paged KV pool.

For a query at position p of its sequence, head h, KV head g = h // (heads / kv_heads):
    out = sum_j softmax_j(q . k_j * scale) v_j
over positions j <= p, and j > p - window if there is a window.
ScoreTerms add to the scores of some models. In a pool of one part v_j is the first value_dim
elements of k_j.

`plan_attention` computes on the host, once per step, what all layers with the same window read.
Sequences with few new tokens (decode, verification) run together in groups of similar length; the
KV of a group is gathered per layer, limited to the blocks in its window. A sequence with many new
tokens (prefill) runs alone in tiles of queries, each over the keys that it may see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from baton_kernels.dispatch import op
from baton_kernels.kv_write import head_stride
from baton_kernels.quantize_rows import dequantize_rows

#: Sequences with at most this many new tokens are grouped.
MAX_GROUPED_TOKENS = 16
#: Maximum padded KV tokens of a group: bounds the gathered copy.
MAX_GROUP_KV_TOKENS = 8192
#: Queries per tile of a long sequence.
TILE_TOKENS = 256
#: Without a window, keys are padded (masked) to a multiple of this, and queries to at least as many
#: rows. Matrix products and sums then have a fixed order of terms, so that low-precision results
#: are bit-identical for any split into chunks.
ALIGN = 16


class AttentionSlice(NamedTuple):
    """A sequence's slice of the batch: its new tokens are rows [first_row, first_row + num_tokens),
    at positions from `start` on.

    A NamedTuple because one is made per sequence and step, and dataclasses cost more.
    """

    first_row: int
    num_tokens: int
    start: int
    block_table: Sequence[int]


class PlacedTables(NamedTuple):
    """Block tables that are already in device memory: slice i's table starts at entry begins[i] of
    `entries` int32."""

    entries: torch.Tensor
    begins: Sequence[int]


class PlanKey(NamedTuple):
    """Scale of the scores and window, None for none: layers with equal ones share a step's plan."""

    scale: float
    window: int | None


@dataclass(frozen=True, slots=True)
class ScoreTerms:
    """Terms that a layer applies to the scores x of head h, in this order.

    softcap: x becomes softcap * tanh(x / softcap) (Gemma 2). slopes [heads] float32: slopes[h] * (j
    - p) is added (ALiBi, Press et al. 2022). sinks [heads] float32: exp(sinks[h]) is added to the
    sum that weights are divided by (gpt-oss). A layer cannot have both slopes and sinks: with
    sinks, the origin of j would matter.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.sinks is not None and self.slopes is not None:
            raise ValueError("a layer with both sinks and slopes")

    @property
    def is_none(self) -> bool:
        return self.softcap is None and self.sinks is None and self.slopes is None


NO_TERMS = ScoreTerms()


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with the same number of new tokens.

    rows: [seqs * num_tokens] int64, rows of the packed batch.
    kv_rows: [seqs * kv_heads * blocks] int64, see _kv_rows.
    bias: [seqs, 1, rows or 1, blocks * block_size], 0 or -inf; rows as in _run_group.
    stale: rows of the gathered KV, seen as [seqs * kv_heads * blocks * block_size, head_dim],
        that no token of the sequence wrote. They are masked by multiplication, so a NaN left by an
        earlier owner would spread: they are set to 0.
    """

    num_seqs: int
    num_tokens: int
    rows: torch.Tensor
    kv_rows: torch.Tensor
    bias: torch.Tensor
    stale: torch.Tensor


@dataclass(frozen=True, slots=True)
class Long:
    """A sequence with many new tokens.

    kv_rows: [kv_heads * blocks] int64 of the gathered KV, which starts at position `first_kv`. None
    if all keys are new and the pool does not round: then nothing is gathered.
    """

    first_row: int
    num_tokens: int
    start: int
    first_kv: int
    kv_rows: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Plan of one step, shared by the layers with one window.

    band: [TILE_TOKENS, reach + TILE_TOKENS + ALIGN]; band[i, reach + d] is the bias of query a + i
    on key a + d.
    """

    scale: float
    window: int | None
    groups: tuple[Group, ...]
    longs: tuple[Long, ...]
    band: torch.Tensor | None
    reach: int


@op
def plan_attention(
    slices: Sequence[AttentionSlice],
    pool: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int | None,
    dtype: torch.dtype | None = None,
    placed: PlacedTables | None = None,  # noqa: ARG001
) -> AttentionPlan:
    """Plan one step over `pool` [blocks, layers, parts, kv_heads, block_size, head_dim] (see
    kv_write) for queries of `dtype` (default: the pool's). placed: the slices' block tables in
    device memory, which saves sending them."""
    dtype = dtype or pool.dtype
    short = [s for s in slices if s.num_tokens <= MAX_GROUPED_TOKENS]
    longs = [
        _plan_long(s, pool, window, dtype) for s in slices if s.num_tokens > MAX_GROUPED_TOKENS
    ]
    groups = [
        _plan_group(members, pool, num_heads, window, dtype)
        for members in _like_lengths(short, pool.shape[4], window)
    ]
    reach = max((long.start + long.num_tokens - long.first_kv for long in longs), default=0)
    band = _band(reach, window, dtype, pool.device) if longs else None
    return AttentionPlan(scale, window, tuple(groups), tuple(longs), band, reach)


def _first_block(part: AttentionSlice, block_size: int, window: int | None) -> int:
    """Index in the block table of the first block that any query of the slice sees."""
    return 0 if window is None else max(0, part.start - window + 1) // block_size


def _num_blocks(part: AttentionSlice, block_size: int, window: int | None) -> int:
    end = -(-(part.start + part.num_tokens) // block_size)
    return end - _first_block(part, block_size, window)


def _like_lengths(
    slices: Sequence[AttentionSlice], block_size: int, window: int | None
) -> list[list[AttentionSlice]]:
    """Split into groups of equal num_tokens; padding at most doubles the KV read per group."""
    groups: list[list[AttentionSlice]] = []
    longest = 0
    order = sorted(slices, key=lambda s: (s.num_tokens, -_num_blocks(s, block_size, window)))
    for part in order:
        blocks = _num_blocks(part, block_size, window)
        group = groups[-1] if groups else None
        if (
            group is not None
            and group[0].num_tokens == part.num_tokens
            and 2 * blocks >= longest
            and (len(group) + 1) * longest * block_size <= MAX_GROUP_KV_TOKENS
        ):
            group.append(part)
        else:
            groups.append([part])
            longest = blocks
    return groups


def _kv_rows(tables: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """tables [seqs, blocks] -> flat [seqs, kv_heads, blocks]: rows of the first layer's keys in
    _heads(pool). Values are kv_heads rows further, the next layer parts * kv_heads."""
    _, num_layers, num_parts, num_kv_heads, _, _ = pool.shape
    heads = torch.arange(num_kv_heads, device=tables.device)
    first = tables * (num_layers * num_parts * num_kv_heads)
    return (first[:, None, :] + heads[None, :, None]).flatten()


def _plan_group(
    members: Sequence[AttentionSlice],
    pool: torch.Tensor,
    num_heads: int,
    window: int | None,
    dtype: torch.dtype,
) -> Group:
    block_size, num_kv_heads = pool.shape[4], pool.shape[3]
    num_tokens = members[0].num_tokens
    first_blocks = [_first_block(m, block_size, window) for m in members]
    widths = [_num_blocks(m, block_size, window) for m in members]
    multiple = ALIGN // math.gcd(ALIGN, block_size)
    width = -(-max(widths) // multiple) * multiple
    # Pad with a block of the sequence itself, so that no other sequence's values are touched.
    tables = torch.tensor(
        [
            [*m.block_table[first : first + own], *([m.block_table[first]] * (width - own))]
            for m, first, own in zip(members, first_blocks, widths, strict=True)
        ]
    )
    key_index = torch.arange(width * block_size)
    steps = torch.arange(num_tokens)
    # Position of each query relative to the first gathered key: [seqs, num_tokens, 1].
    start = torch.tensor(
        [m.start - f * block_size for m, f in zip(members, first_blocks, strict=True)]
    )
    query = (start[:, None] + steps)[:, :, None]
    visible = key_index <= query
    if window is not None:
        visible &= key_index > query - window
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    repeats = 1 if num_tokens == 1 else num_heads // num_kv_heads
    spare = 0 if num_tokens == 1 else max(0, ALIGN - repeats * num_tokens)
    rows = torch.tensor([m.first_row for m in members])[:, None] + steps
    device = pool.device
    return Group(
        len(members),
        num_tokens,
        rows.flatten().to(device),
        _kv_rows(tables, pool).to(device),
        F.pad(bias[:, None].repeat(1, 1, repeats, 1), (0, 0, 0, spare)).to(device),
        _stale_rows(members, first_blocks, widths, width * block_size, pool).to(device),
    )


def _stale_rows(
    members: Sequence[AttentionSlice],
    first_blocks: Sequence[int],
    widths: Sequence[int],
    num_keys: int,
    pool: torch.Tensor,
) -> torch.Tensor:
    """See Group.stale. Padding repeats a full block, which is never stale, except in sequences of a
    single block."""
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    rows = []
    for index, (part, first, own) in enumerate(zip(members, first_blocks, widths, strict=True)):
        used = part.start + part.num_tokens - first * block_size
        slots = torch.arange(used, num_keys if own == 1 else own * block_size)
        heads = torch.arange(index * num_kv_heads, (index + 1) * num_kv_heads)
        rows.append((heads[:, None] * num_keys + slots).flatten())
    return torch.cat(rows)


def _plan_long(
    part: AttentionSlice, pool: torch.Tensor, window: int | None, dtype: torch.dtype
) -> Long:
    # A pool that rounds is read even for new tokens, so that results do not depend on the split
    # into chunks.
    if part.start == 0 and dtype == pool.dtype:
        return Long(part.first_row, part.num_tokens, 0, 0, None)
    block_size = pool.shape[4]
    first = _first_block(part, block_size, window)
    end = first + _num_blocks(part, block_size, window)
    tables = torch.tensor([list(part.block_table[first:end])])
    rows = _kv_rows(tables, pool).to(pool.device)
    return Long(part.first_row, part.num_tokens, part.start, first * block_size, rows)


def _band(reach: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One bias for all tiles: it depends on key minus query position alone, so each tile uses a
    slice of it."""
    query = torch.arange(TILE_TOKENS, device=device)[:, None]
    key = torch.arange(-reach, TILE_TOKENS + ALIGN, device=device)[None, :]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    bias = torch.zeros(visible.shape, dtype=dtype, device=device)
    return bias.masked_fill_(~visible, float("-inf"))


@op
def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    scales: torch.Tensor | None = None,
    terms: ScoreTerms = NO_TERMS,
) -> torch.Tensor:
    """query [tokens, heads, head_dim], key [tokens, kv_heads, head_dim], value [tokens, kv_heads,
    value_dim] -> [tokens, heads, value_dim]; value_dim is head_dim, except in a pool of one part.

    The new keys and values must already be in the pool. scales: of an 8-bit pool, see kv_write.
    Slots after a sequence's last token may hold anything.
    """
    value_dim = value.shape[2]
    out = query.new_empty(*query.shape[:2], value_dim)
    kv = _Layer(pool, scales, layer, value_dim, query.dtype)
    for group in plan.groups:
        _run_group(query, kv, plan.scale, group, terms, out)
    for long in plan.longs:
        _run_long(query, key, value, kv, plan, long, terms, out)
    return out


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's view of the pool, and the dtype to read it as."""

    pool: torch.Tensor
    scales: torch.Tensor | None
    layer: int
    value_dim: int
    dtype: torch.dtype

    @property
    def num_kv_heads(self) -> int:
        return self.pool.shape[3]

    def gather(self, kv_rows: torch.Tensor, num_seqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys [seqs, kv_heads, blocks * block_size, head_dim], and values."""
        num_parts = self.pool.shape[2]
        rows = kv_rows + self.layer * num_parts * self.num_kv_heads
        shape = (num_seqs, self.num_kv_heads, -1, self.pool.shape[5])
        keys = self._rows(rows).view(shape)
        if num_parts == 1:
            return keys, keys[..., : self.value_dim]
        return keys, self._rows(rows + self.num_kv_heads).view(shape)

    def _rows(self, at: torch.Tensor) -> torch.Tensor:
        """[rows, block_size, head_dim] at rows `at` of _heads."""
        shape = (-1, *self.pool.shape[4:])
        if self.scales is None:
            return _heads(self.pool).index_select(0, at).to(self.dtype).view(shape)
        # Select as bytes: torch cannot index every float8 type.
        codes = _heads(self.pool.view(torch.uint8)).index_select(0, at).view(self.pool.dtype)
        return dequantize_rows(
            codes.view(shape), _heads(self.scales).index_select(0, at), self.dtype
        )


def _heads(pool: torch.Tensor) -> torch.Tensor:
    """The pool as [blocks * layers * parts * kv_heads, elements of a head in a block], equally
    spaced."""
    size = pool[0, 0, 0, 0].numel()
    return pool.as_strided((pool.numel() // size, size), (head_stride(pool), 1))


def _run_group(
    query: torch.Tensor,
    kv: _Layer,
    scale: float,
    group: Group,
    terms: ScoreTerms,
    out: torch.Tensor,
) -> None:
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, value_dim = kv.num_kv_heads, kv.value_dim
    shape = (group.num_seqs, group.num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys, values = kv.gather(group.kv_rows, group.num_seqs)
    for gathered in (keys, values):
        gathered.flatten(0, 2).index_fill_(0, group.stale, 0)
    # Query heads that share a KV head become rows of one matrix: [seqs, kv_heads, heads_per_kv *
    # tokens, head_dim].
    packed = query[group.rows].view(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
    num_rows = packed.shape[2]
    packed = F.pad(packed, (0, 0, 0, max(0, ALIGN - num_rows)))
    if terms.is_none:
        result = F.scaled_dot_product_attention(
            packed, keys, values, attn_mask=group.bias, scale=scale
        )
    else:
        heads = torch.arange(num_heads, device=query.device).view(num_kv_heads, -1, 1)
        heads = heads.expand(-1, -1, group.num_tokens).flatten(1)
        heads = F.pad(heads, (0, packed.shape[2] - num_rows))
        result = _attend_with_terms(packed, keys, values, group.bias, scale, terms, heads)
    result = result[:, :, :num_rows]
    result = result.reshape(group.num_seqs, num_kv_heads, shape[3], group.num_tokens, value_dim)
    out[group.rows] = result.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, value_dim)


def _run_long(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: _Layer,
    plan: AttentionPlan,
    long: Long,
    terms: ScoreTerms,
    out: torch.Tensor,
) -> None:
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = kv.num_kv_heads
    own = slice(long.first_row, long.first_row + long.num_tokens)
    if long.kv_rows is None:
        keys, values = (x[own].transpose(0, 1) for x in (key, value))
    else:
        keys, values = (x[0] for x in kv.gather(long.kv_rows, 1))
    num_keys = long.start + long.num_tokens - long.first_kv
    padding = (0, 0, 0, -num_keys % ALIGN)
    keys, values = (F.pad(x[:, :num_keys], padding) for x in (keys, values))
    heads_per_kv = num_heads // num_kv_heads
    queries = query[own].view(-1, num_kv_heads, heads_per_kv, head_dim).permute(1, 2, 0, 3)
    results = out[own].view(-1, num_kv_heads, heads_per_kv, kv.value_dim).permute(1, 2, 0, 3)
    for first in range(0, long.num_tokens, TILE_TOKENS):
        tile = slice(first, min(first + TILE_TOKENS, long.num_tokens))
        # Offsets from the first gathered key: the tile's first query, and the keys [low, high) that
        # the tile sees.
        at = long.start - long.first_kv + first
        low = 0 if plan.window is None else max(0, at - plan.window + 1)
        high = at + tile.stop - tile.start
        high += -high % ALIGN
        if plan.band is None:
            raise ValueError("the plan of a long sequence has no band")
        bias = plan.band[: tile.stop - tile.start, plan.reach + low - at : plan.reach + high - at]
        # KV heads are the batch dimension, and the query heads that share one its heads, so that no
        # KV is repeated.
        part = queries[:, :, tile]
        seen_keys, seen_values = (
            x[:, None, low:high].expand(-1, heads_per_kv, -1, -1) for x in (keys, values)
        )
        if terms.is_none:
            results[:, :, tile] = F.scaled_dot_product_attention(
                part, seen_keys, seen_values, attn_mask=bias, scale=plan.scale
            )
        else:
            heads = torch.arange(num_heads, device=query.device).view(num_kv_heads, -1, 1)
            results[:, :, tile] = _attend_with_terms(
                part, seen_keys, seen_values, bias, plan.scale, terms, heads
            )


def _attend_with_terms(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    terms: ScoreTerms,
    heads: torch.Tensor,
) -> torch.Tensor:
    """scaled_dot_product_attention with score terms, in float32. heads: index of each row's head,
    broadcast over [..., rows] of `query` except for a group's first dimension."""
    scores = query.float() @ keys.float().transpose(-1, -2) * scale
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    if terms.slopes is not None:
        # A constant added to all scores of a row changes no weight, so keys may be counted from any
        # origin.
        places = torch.arange(keys.shape[-2], device=keys.device)
        scores = scores + terms.slopes[heads][..., None] * places
    scores = scores + bias
    if terms.sinks is not None:
        sinks = terms.sinks[heads][..., None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(query.dtype)
