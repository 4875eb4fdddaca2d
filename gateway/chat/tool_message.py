"""Tools for a chat template without a place for them: described to the model in the system message,
calls in Hermes' format. Pure; without other modules of the gateway, for the renderer's process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOLD = (
    "You may call these functions:\n{tools}\n"
    'To call one, write <tool_call>\n{{"name": NAME, "arguments": OBJECT}}\n</tool_call> '
    "and nothing behind it."
)


def has_place_for_tools(template: str) -> bool:
    """Whether a chat template describes tools."""
    return "tools" in template


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages with the tools in the first one, of the system, and calls in their contents."""
    told = _TOLD.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        told = f"{first['content']}\n\n{told}"
    else:
        rest = [*messages]
    return [{"role": "system", "content": told}, *map(_with_calls, rest)]


def _with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    written = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    parts = [part for part in (message["content"], written) if part]
    return {**message, "content": "\n".join(parts)}
