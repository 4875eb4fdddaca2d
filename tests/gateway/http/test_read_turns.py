"""Reads of long requests: bounded over all connections, in turn, and nobody is forgotten."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gateway.http.read_turns import NUM_RESUMED, SLICE_BYTES, SLICE_S, ReadTurns
from tests.support.virtual_loop import run_virtual

PIECE = 2**18


class Client:
    """A reader with bytes to send."""

    def __init__(self, turns: ReadTurns, size: int, piece: int = PIECE) -> None:
        self.turns = turns
        self.left = size
        self.piece = piece
        self.is_paused = False
        self.done_s = 0.0

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def send(self) -> int:
        """As the event loop reads: one piece, if it is not paused."""
        size = 0 if self.is_paused else min(self.piece, self.left)
        self.left -= size
        if size:
            self.turns.count(self, size)
        if size and not self.left:
            self.turns.leave(self)
            self.done_s = asyncio.get_running_loop().time()
        return size


@given(st.lists(st.integers(1, 64), min_size=1, max_size=100), st.integers(0, 100))
def test_reads_are_bounded_and_everyone_is_read(pieces: list[int], num_silent: int) -> None:
    async def main() -> None:
        turns = ReadTurns()
        silent = [Client(turns, 1) for _ in range(num_silent)]
        clients = [Client(turns, num * PIECE) for num in pieces]
        for each in (*silent, *clients):
            turns.count(each, 0)
        num_slices = 0
        while any(each.left for each in clients):
            assert sum(each.send() for _ in range(32) for each in clients) <= SLICE_BYTES + PIECE
            await asyncio.sleep(SLICE_S)
            num_slices += 1
        # In each round everyone resumes once, and reads a piece unless the bytes are used up.
        round_slices = (len(clients) + num_silent) // NUM_RESUMED + 1
        num_rounds = sum(pieces) * PIECE // SLICE_BYTES + max(pieces) + 1
        assert num_slices <= num_rounds * round_slices
        for each in silent:
            turns.leave(each)
        await asyncio.sleep(2 * SLICE_S)
        assert not any(each.is_paused for each in (*clients, *silent))

    run_virtual(main())


def test_a_thousand_clients_of_short_pieces_use_the_whole_slice() -> None:
    """400 KB each, a segment at a time: four of them a slice would take more than a minute."""

    async def main() -> None:
        turns = ReadTurns()
        clients = [Client(turns, 400_000, piece=16_384) for _ in range(1000)]
        for each in clients:
            turns.count(each, 0)
        begin_s = asyncio.get_running_loop().time()
        while left := [each for each in clients if each.left]:
            for _ in range(64):
                for each in [each for each in left if not each.is_paused]:
                    each.send()
            await asyncio.sleep(SLICE_S)
        assert asyncio.get_running_loop().time() - begin_s < 10

    run_virtual(main())


def test_a_short_one_ends_before_long_ones() -> None:
    async def main() -> None:
        turns = ReadTurns()
        clients = [Client(turns, 64 * PIECE) for _ in range(20)]
        clients.append(Client(turns, 2 * PIECE))
        while any(each.left for each in clients):
            for each in clients:
                each.send()
            await asyncio.sleep(SLICE_S)
        assert clients[-1].done_s < min(each.done_s for each in clients[:-1]) / 4

    run_virtual(main())
