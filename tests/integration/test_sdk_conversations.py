"""A conversation means the same at both doors."""

from __future__ import annotations

import json
from pathlib import Path

from baton.client import ChatMessage, ChatPrompt, Tool, ToolCall
from tests.support.http_connection import Connection
from tests.support.live_tiers import live_system
from tests.support.oracle_model import make_oracle_model

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
ARGUMENTS = {"city": "Oslo"}


async def test_the_sdk_s_conversation_is_http_s(tmp_path: Path) -> None:
    options = {"model": str(make_oracle_model(tmp_path))}
    call = ToolCall("weather", ARGUMENTS, id="call_1")
    prompt = ChatPrompt(
        [
            ChatMessage("user", "rain?"),
            ChatMessage("assistant", "", tool_calls=[call]),
            {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
        ],
        tools=[Tool("weather", "of a city", PARAMETERS)],
        template_kwargs={"enable_thinking": True},
    )
    function = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
    called = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
    body = {
        "messages": [
            {"role": "user", "content": "rain?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call_1", "type": "function", "function": called}],
            },
            {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
        ],
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"enable_thinking": True},
    }
    async with live_system(worker_options=options, gateway_options=options) as system:
        connection = Connection(system.http)
        answer = await connection.post("/tokenize", json.dumps(body).encode())
        connection.close()
        tokenized = await system.client.tokenize(prompt)
        assert list(tokenized.token_ids) == answer.body["tokens"]
        text = await system.client.detokenize(tokenized.token_ids)
    assert "of a city" in text
    assert '<tool_call>{"' in text
    assert text.endswith("<think>\n")
