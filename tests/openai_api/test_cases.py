"""The table of cases.py, by both of the package's clients, against one live system."""

from __future__ import annotations

import asyncio
import inspect
import operator
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI

from tests.openai_api.cases import CASES, KEY, Case, World
from tests.support.live_tiers import LiveSystem

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Clients:
    """Of HTTP, beneath the package's, which are made anew for each case: a client of HTTP reads all
    certificates of the machine when it is made."""

    blocking: openai.DefaultHttpxClient
    awaited: openai.DefaultAsyncHttpxClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients() -> AsyncIterator[Clients]:
    async with openai.DefaultAsyncHttpxClient() as awaited:
        with openai.DefaultHttpxClient() as blocking:
            yield Clients(blocking, awaited)


def client_options(system: LiveSystem, case: Case) -> dict[str, Any]:
    base_url = f"http://{system.http}/v1"
    return {"base_url": base_url, "api_key": KEY, "max_retries": 0, **case.options}


def call_sync(system: LiveSystem, case: Case, clients: Clients) -> Any:
    client = OpenAI(http_client=clients.blocking, **client_options(system, case))
    try:
        result = operator.attrgetter(case.call)(client)(**case.kwargs)
        return list(result) if case.kwargs.get("stream") else result
    except openai.APIError as error:
        return error


async def call_async(system: LiveSystem, case: Case, clients: Clients) -> Any:
    client = AsyncOpenAI(http_client=clients.awaited, **client_options(system, case))
    try:
        result = operator.attrgetter(case.call)(client)(**case.kwargs)
        if inspect.isawaitable(result):
            result = await result
        return [chunk async for chunk in result] if case.kwargs.get("stream") else result
    except openai.APIError as error:
        return error


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.section}: {case.name}")
async def test_the_openai_package(
    case: Case, system: LiveSystem, world: World, clients: Clients
) -> None:
    for result in (
        await asyncio.to_thread(call_sync, system, case, clients),
        await call_async(system, case, clients),
    ):
        if case.error is not None:
            assert type(result) is case.error, result
        elif isinstance(result, Exception):
            raise result
        case.check(result, world)
