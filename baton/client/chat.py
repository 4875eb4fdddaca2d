"""A conversation as a prompt: its messages, and what the model's chat template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as a model made it. arguments: a JSON object, or its text. id: names the
    call for the tool's answer."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    role: "system", "user", "assistant", "tool" or what else the model's template knows.
    tool_calls: what the assistant called with it. tool_call_id: of a tool's answer, the call's.
    name: of the speaker or the tool, and reasoning_content: what the assistant thought before, for
    templates that use them.
    """

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """What the model may call. parameters: of its arguments, a JSON Schema, or its text."""

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
