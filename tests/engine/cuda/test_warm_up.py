"""Warming up meets every tile that steps of a worker can have, and changes nothing that follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import Sampling
from engine.cuda.warm_up import token_counts, warm_up, warm_up_batches
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.groups.window import WINDOWED
from engine.oracle import OracleEngine, OracleOptions
from tests.engine.conftest import MakeEngine, MakeModel
from tests.support.engines import load_engine


@given(st.integers(1, 3000), st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16]))
def test_every_size_of_a_tile_is_met(most: int, group: int) -> None:
    """group: heads that share a KV head, which are rows of one tile."""

    def sizes(counts: list[int] | range) -> set[int]:
        return {max(16, 1 << (count * group - 1).bit_length()) for count in counts}

    assert sizes(token_counts(most)) >= {size for size in sizes(range(1, most + 1)) if size <= 128}


@given(st.integers(1, 3000))
def test_numbers_of_every_kind_are_met(most: int) -> None:
    """Triton compiles anew for 1 and for multiples of 16."""
    counts = token_counts(most)
    assert 1 in counts
    assert max(counts) == most
    assert {count % 16 == 0 for count in counts} == {n % 16 == 0 for n in range(1, most + 1)}


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "max_tokens", "max_seqs"),
    [(8, 4096, 2048, 256), (1, 16, 8, 1), (400, 4096, 64, 3), (2, 5, 2048, 256)],
)
def test_any_engine_has_room_for_it(
    num_blocks: int, max_model_len: int, max_tokens: int, max_seqs: int
) -> None:
    engine = OracleEngine(OracleOptions(num_blocks=num_blocks, max_model_len=max_model_len))
    for batch in warm_up_batches(engine.spec, max_tokens, max_seqs):
        assert len(batch.slices) <= max_seqs
        assert batch.num_tokens <= max_tokens
        for part in batch.slices:
            end = part.start + len(part.token_ids)
            assert end <= max_model_len
            assert end <= len(part.block_table) * engine.spec.layout.block_size
            assert max(part.block_table) < num_blocks
    done: list[tuple[int, int]] = []
    warm_up(engine, max_tokens, max_seqs, lambda *at: done.append(at))
    assert [number for number, _ in done] == list(range(done[0][1]))


def test_a_model_computes_it_and_what_follows_is_as_without(tiny_engine: MakeEngine) -> None:
    tokens = (3, 1, 4, 1, 5)
    row = SampleRow(4, Sampling(temperature=1.0, seed=7), tokens, len(tokens))
    batch = Batch((SequenceSlice(tokens, 0, (1, 0), (row,)),))
    fresh, warm = (tiny_engine(block_size=4, num_blocks=32) for _ in range(2))
    warm_up(warm, 64, 8, lambda _number, _of: None)
    assert warm.forward(batch) == fresh.forward(batch)


@pytest.mark.slow
def test_windowed_layers_with_slots_are_warmed_up(tiny_model: MakeModel) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    engine = load_engine(
        str(tiny_model("qwen2", **windows)),
        num_blocks=40,
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        frees_windows=True,
    )
    table = engine.kv.slot_tables[WINDOWED]
    warm_up(engine, 8, 3, lambda _number, _of: None)
    assert set(table.of_block) == {-1}
