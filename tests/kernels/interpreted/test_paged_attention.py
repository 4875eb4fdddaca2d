"""The attention kernels against their formula and their twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton_kernels import paged_attention as twins
from baton_kernels.gpu import attention_merge, attention_plan
from baton_kernels.gpu import paged_attention as kernels
from baton_kernels.paged_attention import NO_TERMS, ScoreTerms
from baton_kernels.quantize_rows import dequantize_rows, quantize_rows
from bench.gpu.paged_batch import (
    Heads,
    PagedBatch,
    in_one_memory,
    make_paged_batch,
    reference_attention,
)
from engine.torch.device_tables import DeviceTables

MIXED = [(0, 1), (37, 1), (20, 3), (0, 9), (11, 30)]


def batch_of(
    lengths: list[tuple[int, int]], heads: Heads, block_size: int, dtype: torch.dtype
) -> PagedBatch:
    return make_paged_batch(
        lengths, heads, block_size, dtype, torch.Generator().manual_seed(len(lengths))
    )


def choose_with(
    block_n: int | None,
) -> Callable[[int, torch.Tensor, torch.dtype], attention_plan.Tile]:
    """The usual tiles, with so many keys."""

    def choose(num_rows: int, pool: torch.Tensor, dtype: torch.dtype) -> attention_plan.Tile:
        tile = attention_plan.choose_tile(num_rows, pool, dtype)
        return tile if block_n is None else replace(tile, block_n=block_n)

    return choose


def run(
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    terms: ScoreTerms = NO_TERMS,
    block_n: int | None = None,
) -> torch.Tensor:
    plan = kernels.plan_attention(
        batch.slices,
        batch.pool,
        batch.query.shape[1],
        scale,
        window,
        choose=choose_with(block_n),
    )
    return kernels.paged_attention(
        batch.query, batch.key, batch.value, batch.pool, batch.layer, plan, terms=terms
    )


@pytest.mark.parametrize("window", [None, 1, 13])
@pytest.mark.parametrize(
    ("heads", "block_size"),
    [(Heads(1, 1, 16), 16), (Heads(6, 2, 6), 5), (Heads(5, 1, 40), 32), (Heads(4, 4, 8), 1)],
)
def test_mixed_batch(heads: Heads, block_size: int, window: int | None) -> None:
    batch = batch_of(MIXED, heads, block_size, torch.float32)
    got = run(batch, 0.3, window)
    torch.testing.assert_close(
        got.double(), reference_attention(batch, 0.3, window), atol=2e-5, rtol=1e-4
    )
    plan = twins.plan_attention(batch.slices, batch.pool, heads.num_heads, 0.3, window)
    twin = twins.paged_attention(batch.query, batch.key, batch.value, batch.pool, batch.layer, plan)
    torch.testing.assert_close(got, twin, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("terms", [NO_TERMS, ScoreTerms(sinks=torch.tensor([3.0, -2.0]))])
def test_what_blocks_behind_the_window_hold_is_not_read(terms: ScoreTerms) -> None:
    """They are those of other sequences by then."""
    heads, size, window = Heads(2, 1, 16), 4, 13
    batch = batch_of([(37, 1), (20, 3), (40, 30)], heads, size, torch.float32)
    wanted = run(batch, 0.3, window, terms)
    for part in batch.slices:
        behind = part.block_table[: (part.start - window + 1) // size]
        batch.pool[list(behind)] = torch.nan
    assert torch.equal(run(batch, 0.3, window, terms), wanted)


def test_half_precision() -> None:
    batch = batch_of(MIXED, Heads(6, 2, 16), 16, torch.float16)
    wanted = reference_attention(batch, 0.25)
    torch.testing.assert_close(run(batch, 0.25).double(), wanted, atol=4e-3, rtol=4e-3)


def test_soft_cap_and_alibi() -> None:
    batch = batch_of(MIXED, Heads(6, 2, 16), 16, torch.float32)
    terms = ScoreTerms(3.0, slopes=2.0 ** -torch.arange(1, 7).float())
    got = run(batch, 2.0, None, terms)
    wanted = reference_attention(batch, 2.0, None, terms)
    torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=1e-4)


SINKS = ScoreTerms(sinks=torch.tensor([3.0, -2.0, 0.0, 90.0, -90.0, 1.0]))


@pytest.mark.parametrize("terms", [NO_TERMS, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 30, 600])
def test_split_keys(monkeypatch: pytest.MonkeyPatch, window: int | None, terms: ScoreTerms) -> None:
    """Ranges with keys that no query, some queries or all queries see; the last one has a single
    key. A sink counts once."""
    monkeypatch.setattr(attention_plan, "SPLIT_TOKENS", 32)
    monkeypatch.setattr(attention_merge, "MERGE_PARTS", 2)
    lengths = [(96, 1), (63, 4), (126, 3), (5, 2)]
    batch = batch_of(lengths, Heads(6, 2, 16), 16, torch.float32)
    wanted = reference_attention(batch, 0.3, window, terms)
    torch.testing.assert_close(
        run(batch, 0.3, window, terms, block_n=16).double(), wanted, atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("window", [None, 150])
def test_few_new_tokens_after_a_long_prefix(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """More rows than a sequence with the smallest ranges has: of one tile, of several, and of too
    many for keys to be split. They are the same alone and in company."""
    monkeypatch.setattr(attention_plan, "MAX_SPLIT_ROWS", 4)
    monkeypatch.setattr(attention_plan, "SPLIT_TOKENS", 32)
    monkeypatch.setattr(attention_plan, "LONG_SPLIT_TOKENS", 64)
    monkeypatch.setattr(attention_plan, "MAX_SPLIT_TILES", 4)
    lengths = [(300, 5), (190, 9), (253, 30), (100, 40), (70, 1)]
    batch = batch_of(lengths, Heads(4, 2, 16), 16, torch.float32)
    plan = kernels.plan_attention(batch.slices, batch.pool, 4, 0.3, window, choose=choose_with(16))
    (launch,) = plan.launches
    sizes = {}
    for first, _, _, _, begin, end, index in launch.items.tolist():
        part = next(p for p in batch.slices if p.first_row <= first < p.first_row + p.num_tokens)
        sizes.setdefault((part.start, part.num_tokens), []).append((begin, end, index))
    # 10 rows are one tile of 16, 18 are two, 60 are four, and 80 five.
    for length, size in zip(lengths[:3], (64, 128, 256), strict=True):
        assert len(sizes[length]) > 1
        assert all(begin // size == (end - 1) // size for begin, end, _ in sizes[length])
    assert all(index == -1 for _, _, index in sizes[100, 40])
    got = kernels.attend(batch.query, batch.pool, None, batch.layer, plan)
    wanted = reference_attention(batch, 0.3, window)
    torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=1e-4)
    for part in batch.slices:
        rows = slice(part.first_row, part.first_row + part.num_tokens)
        own = kernels.plan_attention(
            [part._replace(first_row=0)], batch.pool, 4, 0.3, window, choose=choose_with(16)
        )
        alone = kernels.attend(batch.query[rows], batch.pool, None, batch.layer, own)
        assert torch.equal(alone, got[rows])


def test_each_token_is_merged_once_by_programs_that_all_have_one() -> None:
    """A decoding sequence beside one that verifies and a prompt's end."""
    tile = attention_plan.choose_tile(16, torch.empty(1, 1, 2, 2, 16, 128), torch.float16)
    work = attention_plan.WorkList(tile, 4, None)
    for first, (start, count) in enumerate([(1500, 1), (700, 4), (10, 2), (511, 2)]):
        work.add(twins.AttentionSlice(10 * first, count, start, ()), 0)
    assert [merge[:2] for merge in work.merges] == [
        *((0, 0), (10, 0), (11, 1), (12, 2), (13, 3), (30, 0), (31, 1)),
    ]
    assert all(num_parts > 1 for *_, num_parts in work.merges)


def test_tokens_of_the_query_may_be_apart() -> None:
    batch = batch_of([(9, 2), (3, 1)], Heads(2, 1, 16), 16, torch.float32)
    apart = torch.zeros(3, 5, 16)
    apart[:, 1:3] = batch.query
    plan = kernels.plan_attention(batch.slices, batch.pool, 2, 0.3, None)
    got = kernels.attend(apart[:, 1:3], batch.pool, None, batch.layer, plan)
    assert torch.equal(got, run(batch, 0.3))


def test_a_row_does_not_depend_on_the_batch_nor_on_rows_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit: a sequence alone and among others; its last token decoded and verified with
    those before it."""
    monkeypatch.setattr(attention_plan, "SPLIT_TOKENS", 32)
    batch = batch_of([(70, 3), (5, 1), (90, 2)], Heads(4, 2, 16), 16, torch.float32)
    together = run(batch, 0.3, block_n=16)
    plan = kernels.plan_attention(
        [twins.AttentionSlice(0, 1, 72, batch.slices[0].block_table)],
        batch.pool,
        4,
        0.3,
        None,
        choose=choose_with(16),
    )
    alone = kernels.attend(batch.query[2:3], batch.pool, None, batch.layer, plan)
    assert torch.equal(alone, together[2:3])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [Heads(6, 2, 16), Heads(4, 4, 6)])
def test_quantised_pool(heads: Heads, dtype: torch.dtype) -> None:
    """What no token wrote is garbage in the scales too."""
    batch = batch_of(MIXED, heads, 6, torch.float32)
    pool, scales = in_one_memory(*quantize_rows(batch.pool, dtype))
    rounded = replace(
        batch,
        history=tuple(
            (
                dequantize_rows(*quantize_rows(keys, dtype), torch.float32),
                dequantize_rows(*quantize_rows(values, dtype), torch.float32),
            )
            for keys, values in batch.history
        ),
    )
    plan = kernels.plan_attention(batch.slices, pool, heads.num_heads, 0.3, None, batch.query.dtype)
    got = kernels.attend(batch.query, pool, scales, batch.layer, plan)
    wanted = reference_attention(rounded, 0.3)
    torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=1e-4)
    args = (batch.query, batch.key, batch.value, pool, batch.layer)
    twin_plan = twins.plan_attention.twin(
        batch.slices, pool, heads.num_heads, 0.3, None, batch.query.dtype
    )
    twin = twins.paged_attention.twin(*args, twin_plan, scales)
    torch.testing.assert_close(got, twin, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 700])
def test_tables_that_are_on_the_device_already_are_read_there(window: int | None) -> None:
    """In rows of their own, beside what other steps left there; what the device plans of sequences
    with one new token is what the host plans."""
    lengths = [(0, 1), (37, 1), (20, 3), (1300, 1), (11, 30), (600, 1), (510, 5)]
    batch = batch_of(lengths, Heads(4, 2, 16), 16, torch.float32)
    tables = DeviceTables(len(lengths) + 2, 90, torch.device("cpu"))
    tables.place([[7] * 8, [9] * 8])
    placed = tables.placed([part.block_table for part in batch.slices])
    assert placed
    whole, by_rows = (
        kernels.plan_attention(batch.slices, batch.pool, 4, 0.3, window, None, where)
        for where in (None, placed)
    )
    assert by_rows.table is tables.entries
    found = [
        kernels.attend(batch.query, batch.pool, None, batch.layer, plan)
        for plan in (whole, by_rows)
    ]
    assert torch.equal(*found)
