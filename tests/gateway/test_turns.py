"""Turns of new requests."""

from __future__ import annotations

import asyncio
import itertools

from gateway.long_work import Turns


async def test_one_request_starts_per_iteration_and_in_order() -> None:
    turns, started, log = Turns(), [], []
    loop = asyncio.get_running_loop()

    async def start(number: int) -> None:
        await turns.take()
        started.append(number)
        log.append("start")

    def tick() -> None:
        log.append("tick")
        if len(started) < 8:
            loop.call_soon(tick)

    tasks = [asyncio.create_task(start(number)) for number in range(10)]
    loop.call_soon(tick)
    await asyncio.sleep(0)
    tasks[3].cancel()
    tasks[9].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert started == [0, 1, 2, 4, 5, 6, 7, 8]
    assert all(pair != ("start", "start") for pair in itertools.pairwise(log))
    await turns.take()  # those that left do not block it
