"""Exactly the piece that takes too long ends its request, at the moment that it does."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ClientStalled
from baton.types import FinishReason, Sampling, SequenceSpec
from baton.v1 import inference_pb2
from gateway.intake.request import TextOptions, ValidatedRequest
from gateway.output.delivery import Delivery, Write
from gateway.output.output import Piece
from gateway.telemetry.timing import Timeline
from tests.support.virtual_loop import run_virtual

TIMEOUT_S = 30.0

#: (silence before a piece, time that the piece takes), in seconds.
PIECES = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 60)), max_size=6)


PIECE = Piece(1, (), "x", FinishReason.NONE)


async def take_at_once(_: inference_pb2.GenerateResponse) -> None: ...


def delivery(write: Write = take_at_once) -> Delivery:
    request = ValidatedRequest(SequenceSpec("r", (1,), Sampling()), TextOptions())
    clock = asyncio.get_running_loop().time
    return Delivery(request, write, Timeline(0.0), clock, TIMEOUT_S)


@given(PIECES)
def test_the_first_piece_that_takes_too_long_ends_the_body(pieces: list[tuple[int, int]]) -> None:
    async def deliver() -> None:
        async def take(_: inference_pb2.GenerateResponse) -> None:
            # Not a whole number of seconds, so that no piece ends at the very moment of the limit.
            await asyncio.sleep(piece_s + 0.5)

        delivered = delivery(take)
        async with delivered.watching():
            for silence_s, piece_s in pieces:  # noqa: B007, read by `take`
                await asyncio.sleep(silence_s)
                taken = delivered.send(0, PIECE, None)
                assert taken is not None
                await taken

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
            async with delivery().watching():
                raise TimeoutError("of the body")

    run_virtual(test())


def test_nothing_is_left_of_it() -> None:
    async def test() -> None:
        async with delivery().watching():
            pass
        before_s = asyncio.get_running_loop().time()
        await asyncio.sleep(10 * TIMEOUT_S)
        assert asyncio.get_running_loop().time() == before_s + 10 * TIMEOUT_S

    run_virtual(test())
