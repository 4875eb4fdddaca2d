"""A server of the fake InferenceService, and a channel to it, in the test's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
import pytest

from baton.rpc.channel import aio_channel
from baton.rpc.server import RunningServer
from tests.support.fake_inference import FakeInference, serve


@pytest.fixture
def fake() -> FakeInference:
    return FakeInference()


@pytest.fixture
async def server(fake: FakeInference) -> AsyncIterator[RunningServer]:
    running = await serve(fake)
    yield running
    await running.stop()


@pytest.fixture
async def channel(server: RunningServer) -> AsyncIterator[grpc.aio.Channel]:
    async with aio_channel(server.address) as channel:
        yield channel
