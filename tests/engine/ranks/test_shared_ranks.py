"""Ranks exchange exactly what they have, whatever its shape and whoever comes first. Here each rank
is a thread."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ranks.shared_ranks import SharedRanks, prepare, segment_bytes
from engine.shard import Shard

STAGING_BYTES = 256
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def on_ranks(
    size: int, run: Callable[[SharedRanks], list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """What `run` returns on each of `size` ranks, which run at once."""
    memory = torch.zeros(segment_bytes(size, STAGING_BYTES), dtype=torch.uint8)
    prepare(memory, size)
    ranks = [SharedRanks(memory, Shard(rank, size), STAGING_BYTES) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, ranks))


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(2, 4),
    exchanges=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 24), st.sampled_from(DTYPES)), max_size=8
    ),
    seed=st.integers(0, 1000),
)
def test_all_get_the_parts_of_all(
    size: int, exchanges: list[tuple[int, int, torch.dtype]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        [
            torch.randint(-99, 99, (rows, columns), generator=generator).to(dtype)
            for _ in range(size)
        ]
        for rows, columns, dtype in exchanges
    ]

    def run(ranks: SharedRanks) -> list[torch.Tensor]:
        return [ranks.gather(part[ranks.shard.rank]) for part in parts]

    wanted = [torch.cat(part, dim=1) for part in parts]
    for got in on_ranks(size, run):
        assert all(map(torch.equal, got, wanted))
        assert [g.dtype for g in got] == [w.dtype for w in wanted]


@settings(deadline=None, max_examples=30)
@given(size=st.integers(2, 4), rows=st.integers(0, 30), num_columns=st.integers(12, 60))
def test_only_the_first_gets_parts_that_need_not_come_out_even(
    size: int, rows: int, num_columns: int
) -> None:
    whole = torch.randn(rows, num_columns)

    def run(ranks: SharedRanks) -> list[torch.Tensor]:
        columns = ranks.shard.part(num_columns)
        part = whole[:, columns.start : columns.stop]
        return [ranks.gather_first(part, num_columns)]

    got = [result for (result,) in on_ranks(size, run)]
    assert torch.equal(got[0], whole)
    assert [g.shape[1] for g in got[1:]] == [
        len(Shard(rank, size).part(num_columns)) for rank in range(1, size)
    ]


def test_what_was_written_before_a_meeting_is_there_after_it() -> None:
    size, num_rounds = 3, 300
    board = torch.zeros(size, dtype=torch.int64)

    def run(ranks: SharedRanks) -> list[torch.Tensor]:
        rng = random.Random(ranks.shard.rank)
        seen = []
        for turn in range(1, num_rounds + 1):
            sum(range(rng.randrange(2000)))  # who comes first changes
            board[ranks.shard.rank] = turn
            ranks.meet()
            seen.append(board.clone())
            ranks.meet()
        return seen

    for seen in on_ranks(size, run):
        assert all(bool((row == turn).all()) for turn, row in enumerate(seen, 1))


def test_a_rank_owns_its_columns() -> None:
    whole = torch.arange(12).view(2, 6)

    def run(ranks: SharedRanks) -> list[torch.Tensor]:
        return [ranks.gather(ranks.own(whole))]

    assert all(torch.equal(got, whole) for (got,) in on_ranks(3, run))
