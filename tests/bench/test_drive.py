"""The open loop: nobody waits for anybody's answer, and a failure is a record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from baton.client import AsyncClient
from baton.errors import Overloaded
from baton.v1 import inference_pb2
from bench.drive import DriveOptions, drive
from bench.measure import Record
from bench.workload import LoadRequest
from tests.support.fake_inference import FakeInference, serve

NUM_REQUESTS = 5
REQUESTS = tuple(LoadRequest(index * 0.001, (1, 2, 3), 4) for index in range(NUM_REQUESTS))


class Barrier(FakeInference):
    """Answers nobody before all have asked."""

    def __init__(self) -> None:
        super().__init__()
        self.all_are_here = asyncio.Event()

    async def _pieces(self, request: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if len(self.requests) == NUM_REQUESTS:
            self.all_are_here.set()
        await self.all_are_here.wait()
        async for piece in super()._pieces(request):
            yield piece


async def drive_against(fake: FakeInference, options: DriveOptions) -> tuple[Record, ...]:
    server = await serve(fake)
    try:
        async with AsyncClient(server.address, max_retries=0) as client:
            return await drive(client, REQUESTS, options)
    finally:
        await server.stop()


async def test_requests_are_sent_whether_or_not_others_are_answered() -> None:
    fake = Barrier()
    records = await drive_against(fake, DriveOptions(cache_salt="s", temperature=0.5))
    assert [record.due_s for record in records] == [request.due_s for request in REQUESTS]
    for record in records:
        assert record.is_complete
        assert record.num_prompt_tokens == 3
        assert record.num_output_tokens == 3
        assert record.due_s <= record.sent_s <= record.pieces[0][0] <= record.end_s
    for request in fake.requests:
        assert request.cache_salt == "s"
        assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (4, True)
        assert request.sampling.temperature == 0.5


async def test_a_request_that_fails_is_told_by_its_reason_and_others_go_on() -> None:
    fake = FakeInference()
    fake.failures.append(Overloaded("full"))
    fake.failures_after_first.append(Overloaded("full now"))
    records = await drive_against(fake, DriveOptions())
    assert sorted(record.error for record in records) == ["", "", "", "OVERLOADED", "OVERLOADED"]
    assert sum(not record.is_complete for record in records) == 2
