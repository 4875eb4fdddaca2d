"""Bodies that Anthropic's API refuses, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from gateway.chat.style import chat_style
from gateway.http.messages import MessagesBody, MessagesFormat
from tests.openai_api.world import MESSAGES
from tests.support.http_bodies import parsed

WEATHER: dict[str, Any] = {"name": "get_weather", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "system", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0].type"),
        ({"system": [{"type": "text"}]}, "system[0].type"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "w"}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "description": 3}]}, "tools[0].description"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": 3}}, "output_config.format"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)
def test_what_is_wrong_is_named_as_this_api_names_it(changed: Any, field: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, **changed}
    with pytest.raises(InvalidRequest) as caught:
        MessagesFormat(
            parsed(MessagesBody, json.dumps(body).encode()),
            lambda token_id: b"%d" % token_id,
            chat_style("", "auto", "auto"),
        )
    assert caught.value.violations[0].field == field
