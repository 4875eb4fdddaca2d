"""A conversation with a call of a tool, by the requests that Open WebUI's backend sends: aiohttp,
its headers and fields, events read by lines. Argument: the base URL.

Open WebUI itself is an application with a database and a page; its requests are those of
open_webui/routers/openai.py, 0.12.4.
"""

import asyncio
import json
import sys
from typing import Any

import aiohttp
from weather import WEATHER

HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}


async def stream(session: aiohttp.ClientSession, payload: dict[str, Any]) -> dict[str, Any]:
    """The message that the events add up to, and `usage`."""
    message: dict[str, Any] = {"content": "", "tool_calls": [], "usage": None}
    asked = {**payload, "stream": True, "stream_options": {"include_usage": True}}
    async with session.request(
        method="POST",
        url=f"{sys.argv[1]}/chat/completions",
        data=json.dumps(asked),
        headers=HEADERS,
    ) as response:
        assert response.status == 200, await response.text()
        assert "text/event-stream" in response.headers["Content-Type"]
        async for line in response.content:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            message["usage"] = event.get("usage") or message["usage"]
            for choice in event["choices"]:
                add_delta(message, choice["delta"])
    return message


def add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    message["content"] += delta.get("content") or ""
    for piece in delta.get("tool_calls") or []:
        if piece["index"] == len(message["tool_calls"]):
            message["tool_calls"].append(piece)
        else:
            function = message["tool_calls"][piece["index"]]["function"]
            function["arguments"] += piece["function"]["arguments"]


async def main() -> None:
    async with aiohttp.ClientSession(trust_env=True) as session:
        async with session.get(f"{sys.argv[1]}/models", headers=HEADERS) as response:
            model = (await response.json())["data"][0]["id"]
        messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
        common = {"model": model, "temperature": 0, "max_tokens": 64}
        tools = {"tools": [WEATHER], "tool_choice": "required"}
        said = await stream(session, {**common, **tools, "messages": messages})
        assert said["tool_calls"]
        for call in said["tool_calls"]:
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
        calls = {"role": "assistant", "content": "", "tool_calls": said["tool_calls"]}
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
            for call in said["tool_calls"]
        ]
        final = await stream(session, {**common, "messages": [*messages, calls, *answers]})
        assert not final["tool_calls"]
        assert final["usage"]["completion_tokens"] > 0


asyncio.run(main())
