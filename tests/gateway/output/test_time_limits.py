"""Exactly the piece that takes too long ends its request, at the moment that it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

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


@asynccontextmanager
async def delivering(write: Write = take_at_once) -> AsyncIterator[Delivery]:
    """The body is cancelled, and ClientStalled raised, when the delivery says so."""
    request = ValidatedRequest(SequenceSpec("r", (1,), Sampling()), TextOptions())
    clock = asyncio.get_running_loop().time
    stalls: list[ClientStalled] = []
    scope = asyncio.timeout(None)

    def on_stall(error: ClientStalled) -> None:
        stalls.append(error)
        scope.reschedule(clock())

    delivered = Delivery(request, write, Timeline(0.0), clock, TIMEOUT_S, on_stall)
    try:
        async with scope:
            yield delivered
    except TimeoutError:
        raise stalls.pop() from None
    finally:
        delivered.close()


@given(PIECES)
def test_the_first_piece_that_takes_too_long_ends_the_body(pieces: list[tuple[int, int]]) -> None:
    async def deliver() -> None:
        async def take(_: inference_pb2.GenerateResponse) -> None:
            # Not a whole number of seconds, so that no piece ends at the very moment of the limit.
            await asyncio.sleep(piece_s + 0.5)

        async with delivering(take) as delivered:
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


def test_nothing_is_left_of_it() -> None:
    async def test() -> None:
        async def take(_: inference_pb2.GenerateResponse) -> None:
            await asyncio.sleep(60 * TIMEOUT_S)

        before = asyncio.all_tasks()
        async with delivering(take) as delivered:
            delivered.send(0, PIECE, None)
            await asyncio.sleep(TIMEOUT_S / 2)
        before_s = asyncio.get_running_loop().time()
        await asyncio.sleep(10 * TIMEOUT_S)
        assert asyncio.get_running_loop().time() == before_s + 10 * TIMEOUT_S
        assert asyncio.all_tasks() == before

    run_virtual(test())
