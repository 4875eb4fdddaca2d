"""Block tables sent as differences arrive as they are, whatever becomes of sequences, and a step
that continues sends a few numbers."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ranks.table_deltas import TableDecoder, TableEncoder

#: Numbers of a continued table: target, base and three counts.
HEADER = 5


def sent(encoder: TableEncoder, decoder: TableDecoder, tables: list[list[int]]) -> int:
    """Send a step, compare what arrives, and return how many numbers were sent."""
    numbers = encoder.encode(tables)
    # What follows in the message is not the decoder's.
    got, taken = decoder.decode(np.array([*numbers, 99, 98], np.int64))
    assert [list(table) for table in got] == tables
    assert all(isinstance(table, array) for table in got)
    assert taken == len(numbers)
    return taken


class History:
    """Block tables of sequences that come, grow, fork, slide their windows, shrink and end. New
    ones get the blocks of those that have ended."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.tables: list[list[int]] = []
        self._num_blocks = 1

    def _block(self) -> int:
        """A block that no sequence has; 0 stands for entries behind a window."""
        used = {block for table in self.tables for block in table}
        free = [block for block in range(1, self._num_blocks) if block not in used]
        if free and self._rng.random() < 0.8:
            return self._rng.choice(free)
        self._num_blocks += 1
        return self._num_blocks - 1

    def step(self) -> list[list[int]]:
        """Tables of the next batch: some of the sequences."""
        rng = self._rng
        if not self.tables or rng.random() < 0.3:
            self.tables.append([])
            for _ in range(rng.randrange(1, 12)):
                self.tables[-1].append(self._block())
        for table in list(self.tables):
            match rng.randrange(9):
                case 0:
                    self.tables.append(table.copy())  # shares all blocks
                case 1:
                    table[-1] = self._block()  # copied on write
                case 2 | 3:
                    table.append(self._block())
                case 4:
                    first = rng.randrange(len(table))
                    table[:first] = [0] * first
                case 5:
                    del table[rng.randrange(1, len(table) + 1) :]
                case 6 if len(self.tables) > 1:
                    self.tables.remove(table)
        return [table.copy() for table in self.tables if rng.random() < 0.7]


@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 40), max_ids=st.integers(0, 120))
def test_tables_of_any_history_arrive(seed: int, num_steps: int, max_ids: int) -> None:
    history, encoder, decoder = History(seed), TableEncoder(max_ids), TableDecoder()
    for _ in range(num_steps):
        sent(encoder, decoder, history.step())


@given(st.lists(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=5), max_size=12))
def test_any_tables_arrive(steps: list[list[list[int]]]) -> None:
    encoder, decoder = TableEncoder(30), TableDecoder()
    for tables in steps:
        sent(encoder, decoder, tables)


def test_both_ends_forget_what_was_not_used_for_longest() -> None:
    encoder, decoder = TableEncoder(max_ids=60), TableDecoder()
    for first in range(0, 5000, 10):
        sent(encoder, decoder, [list(range(first, first + 10))])
    assert len(encoder._tables) == len(decoder._tables) <= 6
    assert max(decoder._tables) < 8


@pytest.mark.parametrize("num_blocks", [7, 625, 62_500])
def test_what_is_sent_does_not_grow_with_the_context(num_blocks: int) -> None:
    """A sequence beside its fork, which share all but their last block; one with a window."""
    encoder, decoder = TableEncoder(), TableDecoder()
    shared = list(range(num_blocks))
    one, fork = [*shared, 100_000], [*shared, 100_001]
    windowed = [*([0] * num_blocks), 100_002, 100_003]
    sent(encoder, decoder, [one, fork, windowed])
    assert sent(encoder, decoder, [one, fork, windowed]) == 2 + 3 * HEADER
    for block in range(200_000, 200_020, 2):
        one.append(block)
        fork.append(block + 1)
        windowed[len(windowed) - 2] = 0
        windowed.append(block + 100_000)
        assert sent(encoder, decoder, [one, fork, windowed]) == 2 + 3 * HEADER + 3 + 2
