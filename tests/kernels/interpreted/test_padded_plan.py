"""Attention over plans that are padded to fixed numbers of programs, against plans that are not."""

from __future__ import annotations

import random

import pytest
import torch

from baton_kernels.gpu.attention_plan import WorkList, choose_tile, most_items, num_items
from baton_kernels.gpu.padded_plan import (
    PlanRoom,
    Sequences,
    empty_partials,
    padded_plan,
    plan_items,
)
from baton_kernels.gpu.paged_attention import attend, plan_attention
from baton_kernels.paged_attention import AttentionSlice
from bench.gpu.paged_batch import Heads, make_paged_batch

HEADS = Heads(4, 2, 16)
GROUP = 2
BLOCK_SIZE = 16


@pytest.mark.parametrize(("window", "spare"), [(None, 0), (None, 3), (700, 3)])
def test_same_bits_as_without_padding(window: int | None, spare: int) -> None:
    """One buffer, filled anew for each step; what earlier steps left in it and in the partial
    results does not matter."""
    generator = torch.Generator().manual_seed(3)
    fields = torch.full((200,), -7, dtype=torch.int32)
    width = 100
    table = torch.full((4 * width,), 1 << 30, dtype=torch.int32)
    for lengths in ([(1500, 1), (3, 1), (600, 1)], [(0, 1)], [(511, 1), (512, 1)]):
        batch = make_paged_batch(lengths, HEADS, BLOCK_SIZE, torch.float32, generator)
        eager = plan_attention(batch.slices, batch.pool, HEADS.num_heads, 0.3, window)
        tile = choose_tile(GROUP, batch.pool, torch.float32)
        work = WorkList(tile, GROUP, window)
        columns = []
        for row, part in enumerate(batch.slices):
            work.add(part, row * width)
            table[row * width :][: len(part.block_table)] = torch.tensor(part.block_table)
            columns.append((part.start, 1, row * width))
        columns += [(0, -1, 0)] * spare
        num_seqs = len(columns)
        num_merges = num_seqs if work.merges or spare else 0
        room = PlanRoom(len(work.items) + 2 * spare, num_merges)
        partials = empty_partials(room.num_items, batch.pool, tile, HEADS.num_heads)
        partials.part.fill_(torch.nan)
        partials.lse.fill_(torch.nan)
        plan = padded_plan(fields[: room.num_fields], table, room, tile, partials, 0.3, window)
        plan_items(Sequences(*torch.tensor(columns, dtype=torch.int32).T.contiguous()), plan)
        real = [tuple(item) for item in plan.launches[0].items.tolist() if item[1] and item[5]]
        assert sorted(real) == sorted(work.items)
        padding = torch.full((spare, HEADS.num_heads, HEADS.head_dim), torch.nan)
        wanted = attend(batch.query, batch.pool, None, batch.layer, eager)
        got = attend(torch.cat((batch.query, padding)), batch.pool, None, batch.layer, plan)
        assert torch.equal(got[: len(wanted)], wanted)
        assert not got[len(wanted) :].any()
        assert partials.part[work.num_parts :].isnan().all(), "padding wrote partial results"
        assert partials.lse[work.num_parts :].isnan().all()


@pytest.mark.parametrize("window", [None, 1, 2, 511, 512, 513, 514, 1300])
def test_most_items_is_the_most(window: int | None) -> None:
    pool = torch.empty(1, 1, 2, 2, BLOCK_SIZE, 16)
    longest = random.Random(window).choice((1023, 1024, 1025, 2600))
    found = []
    tile = choose_tile(GROUP, pool, torch.float32)
    for position in range(longest):
        work = WorkList(tile, GROUP, window)
        work.add(AttentionSlice(0, 1, position, ()), 0)
        assert len(work.items) == num_items(position, window, tile)
        found.append(len(work.items))
    assert max(found) == most_items(longest, window, tile)
