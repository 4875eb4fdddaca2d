"""The rules of tools and template variables in a conversation. Pure."""

from __future__ import annotations

import json
import re

from baton.errors import FieldViolation
from baton.v1 import inference_pb2
from gateway.intake.violations import MAX_SHOWN, ModelFacts, Violations, shown

MAX_TOOLS = 128
MAX_TOOL_CHARS = 65_536
MAX_TOOLS_CHARS = 524_288
MAX_KWARGS_CHARS = 65_536
#: In all messages together.
MAX_TOOL_CALLS = 1024

_PATH = "prompt.chat"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

#: What the renderer sets itself.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def tool_violations(chat: inference_pb2.ChatPrompt, facts: ModelFacts) -> Violations:
    """What is wrong with the tools, their calls, and the template's variables."""
    if chat.tools:
        yield from _tools_violations(chat, facts)
    num_calls = sum(len(message.tool_calls) for message in chat.messages)
    if num_calls > MAX_TOOL_CALLS:
        fault = f"{num_calls} calls of tools; give at most {MAX_TOOL_CALLS}"
        yield FieldViolation(f"{_PATH}.messages", fault)
        return
    for index, message in enumerate(chat.messages):
        for number, call in enumerate(message.tool_calls):
            if not _is_object(call.arguments):
                yield FieldViolation(
                    f"{_PATH}.messages[{index}].tool_calls[{number}].arguments",
                    f"{shown(call.arguments)}: must be a JSON object",
                )
                return
    if chat.template_kwargs:
        yield from _kwargs_violations(chat.template_kwargs)
    if chat.continue_final_message and chat.add_generation_prompt:
        yield FieldViolation(
            f"{_PATH}.add_generation_prompt",
            "true: with continue_final_message nothing begins anew; leave out one of them",
        )


def _tools_violations(chat: inference_pb2.ChatPrompt, facts: ModelFacts) -> Violations:
    field, tools = f"{_PATH}.tools", chat.tools
    if not facts.has_tools:
        yield FieldViolation(
            field, "this model's chat template has no place for tools; leave them out"
        )
    num_chars = sum(len(tool.description) + len(tool.parameters) for tool in tools)
    if len(tools) > MAX_TOOLS or num_chars > MAX_TOOLS_CHARS:
        yield FieldViolation(
            field,
            f"{len(tools)} tools of {num_chars} characters: give at most {MAX_TOOLS}, of "
            f"{MAX_TOOLS_CHARS} characters in all",
        )
        return
    wrong = []
    for index, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            fault = f'{shown(tool.name)}: must have 1 to 64 of letters, digits, "_", "-" and "."'
            wrong.append(FieldViolation(f"{field}[{index}].name", fault))
        elif len(tool.parameters) > MAX_TOOL_CHARS:
            fault = f"{len(tool.parameters)} characters: give at most {MAX_TOOL_CHARS}"
            wrong.append(FieldViolation(f"{field}[{index}].parameters", fault))
        elif tool.parameters and not _is_object(tool.parameters):
            fault = f"{shown(tool.parameters)}: must be a JSON Schema, an object"
            wrong.append(FieldViolation(f"{field}[{index}].parameters", fault))
    yield from wrong[:MAX_SHOWN]


def _kwargs_violations(text: str) -> Violations:
    field = f"{_PATH}.template_kwargs"
    if len(text) > MAX_KWARGS_CHARS:
        yield FieldViolation(field, f"{len(text)} characters: give at most {MAX_KWARGS_CHARS}")
        return
    if not _is_object(text):
        yield FieldViolation(field, f"{shown(text)}: must be a JSON object")
        return
    taken = sorted(_RESERVED & json.loads(text).keys())
    if taken:
        yield FieldViolation(f"{field}.{taken[0]}", "is not a variable of the template's own")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
