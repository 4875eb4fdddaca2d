"""Anthropic's API, by the unmodified `anthropic` package."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic

from tests.openai_api.world import KEY, MESSAGES, MODEL, World
from tests.support.live_tiers import LiveSystem

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

GREEDY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 8,
    "extra_body": {"temperature": 0},
}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALLING: dict[str, Any] = {
    **GREEDY,
    "max_tokens": 400,
    "messages": MESSAGES,
    "tools": [WEATHER],
    "tool_choice": {"type": "tool", "name": "get_weather"},
}


@pytest_asyncio.fixture(loop_scope="module")
async def client(system: LiveSystem) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=f"http://{system.http}", api_key=KEY, max_retries=0) as made:
        yield made


async def test_a_conversation_in_a_message_out(client: AsyncAnthropic, world: World) -> None:
    message = await client.messages.create(messages=MESSAGES, **GREEDY)
    assert message.id == f"msg_{message._request_id}"
    (block,) = message.content
    assert (block.type, block.text) == ("text", world.reply(MESSAGES))
    assert (message.role, message.model, message.stop_reason) == (
        "assistant",
        MODEL,
        "max_tokens",
    )
    usage = message.usage
    num_prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert (num_prompt, usage.output_tokens) == (len(world.chat_ids(MESSAGES)), 8)


async def test_a_stream(client: AsyncAnthropic, world: World) -> None:
    kinds: list[str] = []
    async with client.messages.stream(messages=MESSAGES, **GREEDY) as stream:
        kinds += [event.type async for event in stream]
        message = await stream.get_final_message()
    (block,) = message.content
    assert block.type == "text"
    assert block.text == world.reply(MESSAGES)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-1] == "message_stop"


async def test_system_and_blocks_of_text(client: AsyncAnthropic, world: World) -> None:
    blocks: Any = [{"type": "text", "text": "say"}, {"type": "text", "text": "it"}]
    message = await client.messages.create(
        system=[{"type": "text", "text": "be brief"}],
        messages=[{"role": "user", "content": blocks}],
        **GREEDY,
    )
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say\nit"}]
    assert message.content[0].text == world.reply(chat)


async def test_a_system_message_in_between_stands_where_it_was(
    client: AsyncAnthropic, world: World
) -> None:
    """As coding agents send theirs, with an order for old results of tools that changes nothing."""
    chat: Any = [*MESSAGES, {"role": "system", "content": [{"type": "text", "text": "now"}]}]
    edits = {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}
    options = {**GREEDY, "extra_body": {**GREEDY["extra_body"], **edits}}
    message = await client.messages.create(messages=chat, **options)
    rendered = [*MESSAGES, {"role": "system", "content": "now"}]
    assert message.content[0].text == world.reply(rendered)


async def test_an_assistant_message_at_the_end_is_continued(
    client: AsyncAnthropic, world: World
) -> None:
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "well"}]
    message = await client.messages.create(messages=begun, **GREEDY)
    before = f"<|im_start|>user\n{MESSAGES[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert message.content[0].text == world.completion(f"{before}well")


async def test_stop_sequences_and_a_schema(client: AsyncAnthropic) -> None:
    schema = {"type": "json_schema", "schema": {"enum": ["one two three"]}}
    options = {**GREEDY, "max_tokens": 64, "output_config": {"format": schema}}
    message = await client.messages.create(messages=MESSAGES, **options)
    assert json.loads(message.content[0].text) == "one two three"
    assert message.stop_reason == "end_turn"
    options["stop_sequences"] = ["two"]
    message = await client.messages.create(messages=MESSAGES, **options)
    assert message.content[0].text == '"one '
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")


async def test_a_call_of_a_tool(client: AsyncAnthropic) -> None:
    whole = await client.messages.create(**CALLING)
    (block,) = whole.content
    assert (block.type, block.name) == ("tool_use", "get_weather")
    assert block.input["city"] in ("Oslo", "Rome")
    assert whole.stop_reason == "tool_use"
    async with client.messages.stream(**CALLING) as stream:
        message = await stream.get_final_message()
    assert message.content[0].input == block.input


async def test_a_call_and_its_answer(client: AsyncAnthropic, world: World) -> None:
    conversation: Any = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": "CET"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "noon"},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    message = await client.messages.create(messages=conversation, **GREEDY)
    call = json.dumps({"name": "clock", "arguments": {"zone": "CET"}})
    chat = [
        *MESSAGES,
        {"role": "assistant", "content": f"<think>hm</think><tool_call>{call}</tool_call>"},
        {"role": "tool", "content": "noon"},
        {"role": "user", "content": "so?"},
    ]
    assert message.content[0].text == world.reply(chat)


async def test_tokens_are_counted(client: AsyncAnthropic, world: World) -> None:
    counted = await client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    assert counted.input_tokens == len(world.chat_ids(MESSAGES))


@pytest.mark.parametrize(
    ("changed", "error", "kind", "shown"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error", "other"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
        (
            {"extra_body": {"top_k": -3}},
            anthropic.BadRequestError,
            "invalid_request_error",
            "top_k",
        ),
    ],
)
async def test_errors_have_its_form(
    client: AsyncAnthropic, changed: Any, error: Any, kind: str, shown: str
) -> None:
    with pytest.raises(error) as caught:
        await client.messages.create(messages=MESSAGES, **{**GREEDY, **changed})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == kind
    assert shown in caught.value.body["error"]["message"]
    assert caught.value.request_id == caught.value.body["request_id"] is not None


async def test_a_wrong_key(system: LiveSystem) -> None:
    async with AsyncAnthropic(
        base_url=f"http://{system.http}", api_key="wrong", max_retries=0
    ) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await stranger.messages.create(messages=MESSAGES, **GREEDY)
    assert caught.value.body["error"]["type"] == "authentication_error"
    assert caught.value.request_id == caught.value.body["request_id"] is not None
