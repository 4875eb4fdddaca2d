"""The table of cases.py, by both of the package's clients, against one live system."""

from __future__ import annotations

import asyncio
import inspect
import operator
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI

from gateway.server import serve_gateway
from tests.openai_api.cases import CASES, Case
from tests.openai_api.world import KEY, MODEL, World
from tests.support.live_tiers import LiveSystem, options_of_gateway, reporting

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Clients:
    """HTTP clients below the package's, which are made anew for each case: an HTTP client reads all
    certificates of the machine when it is made."""

    blocking: openai.DefaultHttpxClient
    awaited: openai.DefaultAsyncHttpxClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients() -> AsyncIterator[Clients]:
    async with openai.DefaultAsyncHttpxClient() as awaited:
        with openai.DefaultHttpxClient() as blocking:
            yield Clients(blocking, awaited)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(system: LiveSystem, folder: Path) -> AsyncIterator[Mapping[str, str]]:
    """HTTP addresses of gateways before one system's workers, by --tool-call-parser."""
    found = {"auto": system.http}
    given = {"model": str(folder), "served_model_name": MODEL, "api_key": (KEY,)}
    async with AsyncExitStack() as stack:
        for parser in {case.parser for case in CASES} - found.keys():
            options = options_of_gateway(
                system.prefills, system.decodes, **given, tool_call_parser=parser
            )
            report = await stack.enter_async_context(reporting(serve_gateway, options))
            found[parser] = report.http_address
        yield found


def client_options(address: str, case: Case) -> dict[str, Any]:
    base_url = f"http://{address}/v1"
    return {"base_url": base_url, "api_key": KEY, "max_retries": 0, **case.options}


def call_sync(address: str, case: Case, clients: Clients) -> Any:
    client = OpenAI(http_client=clients.blocking, **client_options(address, case))
    try:
        result = operator.attrgetter(case.call)(client)(**case.kwargs)
        return list(result) if case.kwargs.get("stream") else result
    except openai.APIError as error:
        return error


async def call_async(address: str, case: Case, clients: Clients) -> Any:
    client = AsyncOpenAI(http_client=clients.awaited, **client_options(address, case))
    try:
        result = operator.attrgetter(case.call)(client)(**case.kwargs)
        if inspect.isawaitable(result):
            result = await result
        return [chunk async for chunk in result] if case.kwargs.get("stream") else result
    except openai.APIError as error:
        return error


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.section}: {case.name}")
async def test_the_openai_package(
    case: Case, doors: Mapping[str, str], world: World, clients: Clients
) -> None:
    address = doors[case.parser]
    for result in (
        await asyncio.to_thread(call_sync, address, case, clients),
        await call_async(address, case, clients),
    ):
        if case.error is not None:
            assert type(result) is case.error, result
        elif isinstance(result, Exception):
            raise result
        case.check(result, world)
