"""/v1/responses of a gateway that keeps answers, by the unmodified openai package."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from gateway.http.response_store import ResponseStore
from tests.openai_api.world import KEY, MODEL, World
from tests.support.live_tiers import LiveSystem, live_system

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

OTHER_KEY = "another"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(folder: Path) -> AsyncIterator[LiveSystem]:
    common = {"model": str(folder), "served_model_name": MODEL}
    own = {"api_key": (KEY, OTHER_KEY), "response_store_bytes": 2**20}
    async with live_system(
        worker_options=common, gateway_options={**common, **own}, api_key=KEY
    ) as running:
        yield running
        await running.until_quiet()


@pytest_asyncio.fixture(loop_scope="module")
async def client(system: LiveSystem) -> AsyncIterator[openai.AsyncOpenAI]:
    async with _client(system, KEY) as made:
        yield made


def _client(system: LiveSystem, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{system.http}/v1", api_key=key, max_retries=0)


async def _create(client: openai.AsyncOpenAI, text: str = "hi", **more: Any) -> Any:
    given = {"temperature": 0, "max_output_tokens": 8, **more}
    return await client.responses.create(model=MODEL, input=text, **given)


async def test_an_answer_is_there_until_it_is_deleted(client: openai.AsyncOpenAI) -> None:
    made = await _create(client)
    assert made.store
    assert await client.responses.retrieve(made.id) == made
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found\."):
        await client.responses.retrieve(made.id)


async def test_a_streamed_answer_is_kept(client: openai.AsyncOpenAI) -> None:
    events = [event async for event in await _create(client, stream=True)]
    made = events[-1].response
    assert (await client.responses.retrieve(made.id)).output == made.output


async def test_an_answer_that_is_not_to_be_stored_is_not(client: openai.AsyncOpenAI) -> None:
    made = await _create(client, store=False)
    assert not made.store
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


async def test_a_conversation_goes_on(client: openai.AsyncOpenAI, world: World) -> None:
    first = await _create(client, "hi", instructions="be short")
    second = await _create(client, "again", previous_response_id=first.id)
    third = await _create(client, "more", previous_response_id=second.id, store=False)
    said = [("user", "hi"), ("assistant", first.output_text), ("user", "again")]
    assert second.previous_response_id == first.id
    assert second.output_text == world.reply(_messages(said))
    said += [("assistant", second.output_text), ("user", "more")]
    assert third.output_text == world.reply(_messages(said))


def _messages(said: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


async def test_another_key_finds_nothing(system: LiveSystem, client: openai.AsyncOpenAI) -> None:
    made = await _create(client)
    behind = await _create(client, background=True, max_output_tokens=900)
    async with _client(system, OTHER_KEY) as other:
        for response_id in (made.id, behind.id):
            for call in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(response_id)
            with pytest.raises(openai.NotFoundError) as error:
                await _create(other, previous_response_id=response_id)
            assert error.value.param == "previous_response_id"
    assert await client.responses.retrieve(made.id) == made
    assert (await client.responses.retrieve(behind.id)).status in ("in_progress", "incomplete")
    await client.responses.delete(behind.id)


async def test_in_the_background(client: openai.AsyncOpenAI, world: World) -> None:
    queued = await _create(client, background=True)
    assert (queued.status, queued.output) == ("queued", [])
    while (made := await client.responses.retrieve(queued.id)).status == "in_progress":
        await asyncio.sleep(0)
    assert (made.status, made.id) == ("incomplete", queued.id)
    assert made.output_text == world.reply([{"role": "user", "content": "hi"}])
    assert made.background


async def test_what_is_made_in_the_background_can_be_cancelled(
    client: openai.AsyncOpenAI, system: LiveSystem
) -> None:
    more: Any = {"max_output_tokens": 3900, "extra_body": {"ignore_eos": True}}
    queued = await _create(client, background=True, **more)
    assert (await client.responses.cancel(queued.id)).status == "cancelled"
    await system.until_quiet()  # nobody goes on computing it
    assert (await client.responses.retrieve(queued.id)).status == "cancelled"
    assert (await client.responses.cancel(queued.id)).status == "cancelled"


async def test_what_was_awaited_cannot_be_cancelled(client: openai.AsyncOpenAI) -> None:
    made = await _create(client)
    with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a synchronous response\."):
        await client.responses.cancel(made.id)


async def test_a_conversation_goes_on_from_a_whole_answer_only(client: openai.AsyncOpenAI) -> None:
    more: Any = {"max_output_tokens": 3900, "extra_body": {"ignore_eos": True}}
    queued = await _create(client, background=True, **more)
    for status in ("in_progress", "cancelled"):
        with pytest.raises(openai.BadRequestError, match=f"is {status}; give that of") as error:
            await _create(client, previous_response_id=queued.id)
        assert error.value.param == "previous_response_id"
        await client.responses.cancel(queued.id)


async def test_log_probabilities_are_no_part_of_a_conversation(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, put = list[Any](), ResponseStore.put

    def noting(self: ResponseStore, owner: bytes, name: str, document: Any, items: Any) -> None:
        kept.append(items)
        put(self, owner, name, document, items)

    monkeypatch.setattr(ResponseStore, "put", noting)
    made = await _create(client, include=["message.output_text.logprobs"], top_logprobs=2)
    assert made.output[0].content[0].logprobs
    assert await client.responses.retrieve(made.id) == made
    ((_, answer),) = kept
    assert (answer["content"][0]["text"], answer["content"][0]["logprobs"]) == (
        made.output_text,
        [],
    )


async def test_without_keys_whoever_knows_an_id_finds_it(folder: Path) -> None:
    async with _without_keys(folder) as system, _client(system, KEY) as one:
        made = await _create(one)
        async with _client(system, OTHER_KEY) as other:
            assert await other.responses.retrieve(made.id) == made


async def test_a_gateway_that_ends_leaves_nothing_in_the_background(folder: Path) -> None:
    more: Any = {"max_output_tokens": 3900, "extra_body": {"ignore_eos": True}}
    async with _without_keys(folder) as system, _client(system, KEY) as client:
        await _create(client, background=True, **more)
        before = asyncio.all_tasks()
    assert not [t for t in before if not t.done() and "_watched" in repr(t.get_coro())]


def _without_keys(folder: Path) -> AbstractAsyncContextManager[LiveSystem]:
    common = {"model": str(folder), "served_model_name": MODEL}
    own = {"response_store_bytes": 2**20}
    return live_system(worker_options=common, gateway_options={**common, **own})


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"store": False}, "background"),
        ({"stream": True}, "background"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"extra_body": {"max_output_tokens": "x"}}, "max_output_tokens"),
    ],
)
async def test_a_wrong_request_fails_at_once(
    client: openai.AsyncOpenAI, more: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await _create(client, background=True, **more)
    assert error.value.param == param


@pytest.mark.parametrize("name", ["resp_1", "../models", "%00", "x" * 4000, "cancel"])
async def test_an_id_that_is_none(client: openai.AsyncOpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(name)
