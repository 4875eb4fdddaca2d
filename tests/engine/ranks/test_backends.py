"""Ranks exchange exactly what they have over every backend, whatever its shape and whoever comes
first. Here each rank is a thread."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError, StartupError
from engine.ranks import exchange, process_groups
from engine.ranks.backends import BACKENDS, choose_backend
from engine.ranks.exchange import ExchangeFailed, Groups, Ranks
from engine.ranks.mesh import Degrees
from engine.shard import Shard
from tests.support.rank_specs import rank_spec

STAGING_BYTES = 256
#: NCCL needs GPUs.
NAMES = ("shm", "gloo")
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def joined(name: str, degrees: Degrees) -> list[Groups]:
    """The groups of each rank of an engine, after they have met. name: of their backend."""
    backend = BACKENDS[name]()
    spec = backend.open(rank_spec(degrees, name, staging_bytes=STAGING_BYTES))

    def join(rank: int) -> Groups:
        return BACKENDS[name]().join(replace(spec, rank=rank))

    try:
        with ThreadPoolExecutor(degrees.num_ranks) as threads:
            return list(threads.map(join, range(degrees.num_ranks)))
    finally:
        for fd in spec.fds:
            os.close(fd)


def on_ranks(
    name: str, size: int, run: Callable[[Ranks], list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """What `run` returns on each of `size` ranks, which run at once."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, (groups.tensor for groups in joined(name, Degrees(size)))))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=30)
@given(
    size=st.integers(2, 4),
    exchanges=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 24), st.sampled_from(DTYPES)), max_size=8
    ),
    seed=st.integers(0, 1000),
)
def test_all_get_the_parts_of_all(
    name: str, size: int, exchanges: list[tuple[int, int, torch.dtype]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        [
            torch.randint(-99, 99, (rows, columns), generator=generator).to(dtype)
            for _ in range(size)
        ]
        for rows, columns, dtype in exchanges
    ]

    def run(ranks: Ranks) -> list[torch.Tensor]:
        return [ranks.gather(part[ranks.shard.rank]) for part in parts]

    wanted = [torch.cat(part, dim=1) for part in parts]
    for got in on_ranks(name, size, run):
        assert all(map(torch.equal, got, wanted))
        assert [g.dtype for g in got] == [w.dtype for w in wanted]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(size=st.integers(2, 4), rows=st.integers(0, 30), num_columns=st.integers(12, 60))
def test_only_the_first_gets_parts_that_need_not_come_out_even(
    name: str, size: int, rows: int, num_columns: int
) -> None:
    whole = torch.randn(rows, num_columns)

    def run(ranks: Ranks) -> list[torch.Tensor]:
        columns = ranks.shard.part(num_columns)
        part = whole[:, columns.start : columns.stop]
        return [ranks.gather_first(part, num_columns)]

    got = [result for (result,) in on_ranks(name, size, run)]
    assert torch.equal(got[0], whole)
    assert [g.shape[1] for g in got[1:]] == [
        len(Shard(rank, size).part(num_columns)) for rank in range(1, size)
    ]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(counts=st.lists(st.integers(0, 30), min_size=2, max_size=4), columns=st.integers(1, 6))
def test_each_gets_its_columns_of_the_rows_of_all(
    name: str, counts: list[int], columns: int
) -> None:
    size = len(counts)
    whole = torch.randn(sum(counts), size * columns)
    parts = whole.split(counts)

    def run(ranks: Ranks) -> list[torch.Tensor]:
        return [ranks.exchange(parts[ranks.shard.rank], counts)]

    got = torch.cat([result for (result,) in on_ranks(name, size, run)], dim=1)
    assert torch.equal(got, whole)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(
    counts=st.integers(2, 4).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 30), min_size=size, max_size=size),
            min_size=size,
            max_size=size,
        )
    ),
    columns=st.integers(1, 40),
)
def test_each_gets_the_rows_that_are_for_it(
    name: str, counts: list[list[int]], columns: int
) -> None:
    size = len(counts)
    sent = [torch.randn(sum(row), columns) for row in counts]

    def run(ranks: Ranks) -> list[torch.Tensor]:
        return [ranks.send_rows(sent[ranks.shard.rank], counts)]

    pieces = [rows.split(row) for rows, row in zip(sent, counts, strict=True)]
    for rank, (got,) in enumerate(on_ranks(name, size, run)):
        assert torch.equal(got, torch.cat([piece[rank] for piece in pieces]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=20)
@given(
    size=st.integers(2, 4),
    rows=st.integers(0, 30),
    columns=st.integers(1, 6),
    has_residual=st.booleans(),
    shares=st.booleans(),
)
def test_sums_are_taken_by_rank_whoever_takes_them(
    name: str,
    dtype: torch.dtype,
    size: int,
    rows: int,
    columns: int,
    has_residual: bool,
    shares: bool,
) -> None:
    """Bits depend neither on the backend nor on whether ranks share out the sum."""
    generator = torch.Generator().manual_seed(rows)
    *parts, residual = torch.randn(size + 1, rows, size * columns, generator=generator).to(dtype)
    given = residual if has_residual else None
    wanted = parts[0].float()
    for part in (*parts[1:], *([residual] if has_residual else [])):
        wanted = wanted + part.float()

    def run(ranks: Ranks) -> list[torch.Tensor]:
        return [ranks.reduce(parts[ranks.shard.rank], given)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "SHARED_SUM_BYTES", 0 if shares else 1 << 30)
        for (got,) in on_ranks(name, size, run):
            assert torch.equal(got, wanted.to(dtype))
            assert got.dtype == dtype


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_before_a_meeting_is_there_after_it(name: str) -> None:
    size, num_rounds = 3, 300 if name == "shm" else 30
    board = torch.zeros(size, dtype=torch.int64)

    def run(ranks: Ranks) -> list[torch.Tensor]:
        rng = random.Random(ranks.shard.rank)
        seen = []
        for turn in range(1, num_rounds + 1):
            sum(range(rng.randrange(2000)))  # who comes first changes
            board[ranks.shard.rank] = turn
            ranks.meet()
            seen.append(board.clone())
            ranks.meet()
        return seen

    for seen in on_ranks(name, size, run):
        assert all(bool((row == turn).all()) for turn, row in enumerate(seen, 1))


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_owns_its_columns(name: str) -> None:
    whole = torch.arange(12).view(2, 6)

    def run(ranks: Ranks) -> list[torch.Tensor]:
        return [ranks.gather(ranks.own(whole))]

    assert all(torch.equal(got, whole) for (got,) in on_ranks(name, 3, run))


@pytest.mark.parametrize("name", NAMES)
def test_groups_exchange_nothing_with_each_other(name: str) -> None:
    groups = joined(name, Degrees(tensor=2, context=2, pipeline=2))

    def gather(rank: int) -> list[list[float]]:
        own = torch.full((1, 1), float(rank))
        return [of_kind.gather(own).flatten().tolist() for of_kind in groups[rank]]

    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(gather, range(8)))
    assert got[:4] == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
    assert got[4:] == [[[4, 5], [4, 6]], [[4, 5], [5, 7]], [[6, 7], [4, 6]], [[6, 7], [5, 7]]]


@pytest.mark.parametrize(
    ("name", "device", "wanted"),
    [("auto", "cpu", "shm"), ("gloo", "cpu", "gloo"), ("auto", "cuda:1", "nccl")],
)
def test_the_backend_fits_the_device(name: str, device: str, wanted: str) -> None:
    assert choose_backend(name, torch.device(device)) == wanted


def test_a_backend_for_another_device_is_refused() -> None:
    told = "distributed_backend=nccl: on cpu use auto or shm or gloo"
    with pytest.raises(ConfigError, match=told):
        choose_backend("nccl", torch.device("cpu"))


def test_nccl_is_another_process_group_behind_the_same_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With gloo in the place of NCCL's group, which needs GPUs."""
    made: list[str] = []

    def make(*given: Any) -> Any:
        made.append("nccl")
        return process_groups._gloo(*given)

    monkeypatch.setitem(process_groups._MAKERS, "nccl", make)
    whole = torch.arange(24.0).view(2, 12)

    def run(ranks: Ranks) -> list[torch.Tensor]:
        reduced = ranks.reduce(whole.clone(), whole)
        return [ranks.gather(ranks.own(whole)), reduced, ranks.reduce(whole[:0])]

    for gathered, reduced, nothing in on_ranks("nccl", 3, run):
        assert torch.equal(gathered, whole)
        assert torch.equal(reduced, 4 * whole)
        assert nothing.shape == (0, 12)
    assert made == ["nccl"] * 3


def test_a_rank_that_finds_no_store_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "_JOIN", timedelta(seconds=1))
    spec = replace(rank_spec(Degrees(2), "gloo"), rank=1, store=("127.0.0.1", 9))
    with pytest.raises(StartupError, match=r"rank 1 of 2 found no .* \(0, 1\) by 127.0.0.1:9"):
        BACKENDS["gloo"]().join(spec)


@pytest.mark.parametrize(
    "exchange",
    [
        lambda ranks, part: ranks.gather(part),
        lambda ranks, part: ranks.gather_first(part, 8),
        lambda ranks, part: ranks.exchange(part, [2, 2]),
        lambda ranks, part: ranks.reduce(part, None),
        lambda ranks, _: ranks.meet(),
    ],
)
def test_an_exchange_over_gloo_with_a_rank_that_is_gone_fails_as_one(
    exchange: Callable[[Ranks, torch.Tensor], Any],
) -> None:
    groups = joined("gloo", Degrees(2))
    del groups[1]
    with pytest.raises(ExchangeFailed):
        exchange(groups[0].tensor, torch.ones(2, 4))
