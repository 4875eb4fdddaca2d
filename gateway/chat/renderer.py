"""Renders conversations with the model's template, in a process that is killed on timeout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from baton.errors import BatonError, FieldViolation, InvalidRequest
from baton.v1 import inference_pb2
from gateway.intake.child import ChildProcess, ChildSpec

RENDER_TIMEOUT_S = 5.0

_MAX_ERROR_CHARS = 300

_NO_MORE: Mapping[str, Any] = MappingProxyType({})


class ChatRenderer:
    """Owns one renderer process; renders one conversation at a time."""

    def __init__(
        self,
        template: str,
        special_tokens: Mapping[str, str],
        *,
        render_timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        self._render_timeout_s = render_timeout_s
        start_line = {"template": template, "special_tokens": dict(special_tokens)}
        self.process = ChildProcess(
            ChildSpec(
                "chat template renderer", "gateway.chat.template", start_line, render_timeout_s
            )
        )

    async def render(
        self, messages: Sequence[tuple[str, str]], more: Mapping[str, Any] = _NO_MORE
    ) -> str:
        """Render (role, content) messages up to the generation prompt. more: see
        gateway.chat.template.

        Raises InvalidRequest if the template rejects them or times out.
        """
        question = {
            "messages": [{"role": role, "num_chars": len(content)} for role, content in messages],
            "text": "".join(content for _, content in messages),
            **more,
        }
        try:
            answer = await self.process.ask(question)
        except TimeoutError:
            raise _refusal(
                f"the chat template took more than {self._render_timeout_s:g} s for these "
                "messages; send fewer or shorter ones"
            ) from None
        if "error" in answer:
            raise _refusal(f"the chat template refuses them: {answer['error'][:_MAX_ERROR_CHARS]}")
        return str(answer["text"])

    async def start(self) -> None:
        """Start the process ahead of the first conversation, without waiting for it to be ready."""
        await self.process.start()

    async def close(self) -> None:
        """End the process."""
        await self.process.close()


def _refusal(description: str) -> BatonError:
    return InvalidRequest.of(FieldViolation("prompt.chat", description))


def more_of(chat: inference_pb2.ChatPrompt) -> Mapping[str, Any]:
    """Parts of a checked conversation other than roles and contents."""
    more: dict[str, Any] = {}
    fields = {i: one for i, message in enumerate(chat.messages) if (one := _fields_of(message))}
    if fields:
        more["fields"] = fields
    if chat.tools:
        more["tools"] = [_tool(tool) for tool in chat.tools]
    if chat.template_kwargs:
        more["kwargs"] = json.loads(chat.template_kwargs)
    if chat.continue_final_message:
        more["continues"] = True
    if chat.HasField("add_generation_prompt"):
        more["add_generation_prompt"] = chat.add_generation_prompt
    return more


def _fields_of(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    """Message fields as transformers' templates expect them: arguments are objects, not text."""
    fields: dict[str, Any] = {}
    for name in ("tool_call_id", "name", "reasoning_content"):
        if getattr(message, name):
            fields[name] = getattr(message, name)
    if message.reasoning_content and not message.content:
        fields["thinking"] = message.reasoning_content  # gpt-oss's name for it, before a call
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return fields


def _tool(tool: inference_pb2.Tool) -> Mapping[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    parameters = {"type": "object", "properties": {}}
    function["parameters"] = json.loads(tool.parameters) if tool.parameters else parameters
    return {"type": "function", "function": function}
