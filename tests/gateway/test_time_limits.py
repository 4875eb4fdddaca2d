"""Exactly the piece that takes too long ends its request, at the moment that it does."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ClientStalled
from gateway.output.time_limits import StallDetector
from tests.support.virtual_loop import run_virtual

TIMEOUT_S = 30.0

#: (silence before a piece, time that the piece takes), in seconds.
PIECES = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 60)), max_size=6)


@given(PIECES)
def test_the_first_piece_that_takes_too_long_ends_the_body(pieces: list[tuple[int, int]]) -> None:
    async def deliver() -> None:
        detector = StallDetector(TIMEOUT_S)
        async with detector.watching():
            for silence_s, piece_s in pieces:
                await asyncio.sleep(silence_s)
                detector.on_write()
                # Not a whole number of seconds, so that no piece ends at the very moment of the
                # limit.
                await asyncio.sleep(piece_s + 0.5)
                detector.on_written()

    async def test() -> None:
        loop = asyncio.get_running_loop()
        end_s, stalls = 0.0, False
        for silence_s, piece_s in pieces:
            stalls = piece_s + 0.5 > TIMEOUT_S
            end_s += silence_s + (TIMEOUT_S if stalls else piece_s + 0.5)
            if stalls:
                break
        begin_s = loop.time()
        with pytest.raises(ClientStalled) if stalls else nullcontext():
            await deliver()
        assert loop.time() - begin_s == pytest.approx(end_s)

    run_virtual(test())


def test_a_timeout_of_the_body_s_own_passes() -> None:
    async def test() -> None:
        with pytest.raises(TimeoutError, match="of the body"):
            async with StallDetector(TIMEOUT_S).watching():
                raise TimeoutError("of the body")

    run_virtual(test())


def test_nothing_is_left_of_it() -> None:
    async def test() -> None:
        async with StallDetector(TIMEOUT_S).watching():
            pass
        before_s = asyncio.get_running_loop().time()
        await asyncio.sleep(10 * TIMEOUT_S)
        assert asyncio.get_running_loop().time() == before_s + 10 * TIMEOUT_S

    run_virtual(test())
