"""Attention plans at fixed addresses: a CUDA graph has its numbers of programs for good, so that a
step's items are padded to them.

An item or a merge of zeros has no tokens: its programs read and write nothing. Real ones are those
of an eager plan, in the same tiles, so that a row gets the same bits whatever it is padded to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import torch

from baton_kernels.gpu.attention_plan import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    AttentionPlan,
    Launch,
    Tile,
    WorkList,
)


@dataclass(frozen=True, slots=True)
class PlanRoom:
    """How many items and merges a plan has, real and padding."""

    num_items: int
    num_merges: int

    @property
    def num_fields(self) -> int:
        """int32 numbers that describe all of them."""
        return self.num_items * ITEM_FIELDS + self.num_merges * MERGE_FIELDS


@dataclass(frozen=True, slots=True)
class Partials:
    """Room for partial results, which the plans of all windows and sizes share: steps run one after
    the other.

    part [parts, kv_heads, block_m, head_dim], lse [parts, kv_heads, block_m], float32.
    """

    part: torch.Tensor
    lse: torch.Tensor


def partial_bytes(pool: torch.Tensor, tile: Tile) -> int:
    """Of one partial result of a pool's heads."""
    return pool.shape[3] * tile.block_m * (pool.shape[5] + 1) * 4


def empty_partials(num_parts: int, pool: torch.Tensor, tile: Tile) -> Partials:
    """Room for `num_parts` of a pool's heads, on its device."""
    shape = (num_parts, pool.shape[3], tile.block_m)
    part = torch.empty(*shape, pool.shape[5], dtype=torch.float32, device=pool.device)
    return Partials(part, torch.empty(shape, dtype=torch.float32, device=pool.device))


def padded_fields(work: WorkList, room: PlanRoom, idle_rows: range) -> Iterator[int]:
    """`room.num_fields` numbers: items, longest first, then merges, each followed by padding. There
    is room for all.

    idle_rows: rows of the batch that only fill it up. Each has an item without keys, which writes
    zeros: what is computed from them is of no interest, but should not be what memory happens to
    hold.
    """
    idle = ((row, 1, 0, 0, 0, 0, -1) for row in idle_rows)
    num_spare = room.num_items - len(work.items) - len(idle_rows)
    return chain(
        chain.from_iterable(work.ordered()),
        chain.from_iterable(idle),
        repeat(0, num_spare * ITEM_FIELDS),
        chain.from_iterable(work.merges),
        repeat(0, (room.num_merges - len(work.merges)) * MERGE_FIELDS),
    )


def padded_plan(
    fields: torch.Tensor,
    table: torch.Tensor,
    room: PlanRoom,
    tile: Tile,
    partials: Partials,
    scale: float,
    window: int | None,
) -> AttentionPlan:
    """The plan that reads what padded_fields gave from `fields` [room.num_fields], and block tables
    from `table`, both int32, whenever it is run. `partials` has room for `room.num_items` parts if
    there are any merges."""
    end_items = room.num_items * ITEM_FIELDS
    launch = Launch(
        tile,
        fields[:end_items].view(-1, ITEM_FIELDS),
        fields[end_items:].view(-1, MERGE_FIELDS),
        partials.part,
        partials.lse,
    )
    return AttentionPlan(scale, window, table, (launch,))
