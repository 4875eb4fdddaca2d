"""A live system on an oracle engine, asked with one key, and what it must answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.openai_api.world import KEY, MODEL, World
from tests.support.http_connection import Connection
from tests.support.live_tiers import LiveSystem, live_system
from tests.support.oracle_model import make_oracle_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_oracle_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def world(folder: Path) -> World:
    return World(Tokenizer.from_file(str(folder / "tokenizer.json")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(folder: Path) -> AsyncIterator[LiveSystem]:
    """In the end nothing of any request is left in it."""
    options = {"model": str(folder), "served_model_name": MODEL}
    async with live_system(
        worker_options=options, gateway_options={**options, "api_key": (KEY,)}, api_key=KEY
    ) as running:
        yield running
        await running.until_quiet()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyless(folder: Path) -> AsyncIterator[LiveSystem]:
    """The same without a key."""
    options = {"model": str(folder), "served_model_name": MODEL}
    async with live_system(worker_options=options, gateway_options=options) as running:
        yield running
        await running.until_quiet()


@pytest_asyncio.fixture(loop_scope="module")
async def connection(keyless: LiveSystem) -> AsyncIterator[Connection]:
    made = Connection(keyless.http)
    yield made
    made.close()
