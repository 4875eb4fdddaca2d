"""Conversations as prompts: messages, tools and options of the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call by the model. arguments: a JSON object, or its text. id: identifies the call in
    the tool's result."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    role: "system", "user", "assistant", "tool" or another role of the model's template. tool_calls:
    made by the assistant. tool_call_id: in a tool's result, the id of the call. name: of the
    speaker or tool; reasoning_content: the assistant's earlier reasoning; both for templates that
    use them.
    """

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call. parameters: JSON Schema of its arguments, or its text."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation of which there is more to say than its messages, oldest first.

    messages: each a ChatMessage, or a mapping with some of its fields. tools: that the template
    describes to the model; its calls come as text, in the model's own format. template_kwargs:
    further variables of the template. continue_final_message: go on with the last message instead
    of answering it. add_generation_prompt: end with what begins an answer; None for unless
    continue_final_message.
    """

    messages: Sequence[ChatMessage | Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
