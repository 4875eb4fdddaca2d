"""Both clients, each beside the fake service: the synchronous one has it in a thread, the other one
in its own loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from baton.client import AsyncClient, Client
from tests.support.fake_inference import FakeInference, FakeInThread, serve


@pytest.fixture
def service() -> Iterator[FakeInThread]:
    with FakeInThread() as running:
        yield running


@pytest.fixture
def client(service: FakeInThread) -> Iterator[Client]:
    with Client(service.address, max_retries=0) as client:
        yield client


@pytest.fixture
def fake() -> FakeInference:
    """The service that `async_client` calls."""
    return FakeInference()


@pytest.fixture
async def async_client(fake: FakeInference) -> AsyncIterator[AsyncClient]:
    server = await serve(fake)
    async with AsyncClient(server.address, max_retries=0) as client:
        yield client
    await server.stop()
