"""Messages and tools of a conversation as OpenAI's clients send them: schemas and conversion to
protobuf. Raises InvalidRequest with the client's field names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from baton.errors import FieldViolation, InvalidRequest
from baton.v1 import inference_pb2
from gateway.chat.style import ChoiceOfTools
from gateway.http.errors import invalid, shown_value
from gateway.http.requests import json_text
from gateway.intake.rules import MAX_SHOWN, MAX_TOOL_CALLS, MAX_TOOL_CHARS, MAX_TOOLS, Violations
from gateway.intake.validator import MAX_MESSAGES

#: Maximum characters of a tool call's arguments or result.
MAX_ARGUMENTS_CHARS = 2**19

#: Types of text parts, and the member that holds the text.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

#: Schema of message content, for /openapi.json.
TEXT_OR_PARTS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object", "required": ["type"]}},
    ]
}

#: Schemas of fields that are parsed here and not by pydantic, for /openapi.json.
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": TEXT_OR_PARTS,
            "name": {"type": "string"},
            "tool_call_id": {"type": "string"},
            "reasoning_content": {"type": "string"},
            "tool_calls": {"type": "array", "items": {"type": "object"}},
        },
    },
}
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
    },
}
TOOLS = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    },
}
TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"]},
            },
        },
    ]
}


def put_messages(
    messages: Sequence[Any], developer_role: str, chat: inference_pb2.ChatPrompt
) -> None:
    """Convert messages. developer_role: the template's name of that role. Raises InvalidRequest."""
    violations = tuple(islice(_put_messages(messages, chat), MAX_SHOWN))
    if violations:
        raise InvalidRequest.of(*violations)
    for message in chat.messages:
        if message.role == "developer":
            message.role = developer_role


def _put_messages(messages: Sequence[Any], chat: inference_pb2.ChatPrompt) -> Violations:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        yield FieldViolation(
            "messages", f"{len(messages)} messages; give at least 1 and at most {MAX_MESSAGES}"
        )
        return
    calls = (m.get("tool_calls") for m in messages if isinstance(m, dict))
    num_calls = sum(len(of_one) for of_one in calls if isinstance(of_one, list))
    if num_calls > MAX_TOOL_CALLS:
        fault = f"{num_calls} calls of tools; give at most {MAX_TOOL_CALLS}"
        yield FieldViolation("messages", fault)
        return
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if isinstance(message, dict):
            yield from _put_message(path, message, chat.messages.add())
        else:
            yield FieldViolation(path, f"{shown_value(message)}: must be an object")


def _put_message(
    path: str, message: Mapping[str, Any], into: inference_pb2.ChatMessage
) -> Violations:
    role = message.get("role")
    if isinstance(role, str) and role:
        into.role = role
    else:
        yield FieldViolation(f"{path}.role", f'{shown_value(role)}: say who speaks, e.g. "user"')
    content = message.get("content")
    if isinstance(content, list):
        violations = list(islice(_part_violations(f"{path}.content", content), MAX_SHOWN))
        yield from violations
        if not violations:
            into.content = "\n".join(part[_TEXT_PARTS[part["type"]]] for part in content)
    elif isinstance(content, str):
        into.content = content
    elif content is not None:
        fault = f"{shown_value(content)}: must be text, or a list of parts"
        yield FieldViolation(f"{path}.content", fault)
    for field, given in (
        ("name", message.get("name")),
        ("tool_call_id", message.get("tool_call_id")),
        ("reasoning_content", message.get("reasoning_content", message.get("reasoning"))),
    ):
        if isinstance(given, str):
            setattr(into, field, given)
        elif given is not None:
            yield FieldViolation(f"{path}.{field}", f"{shown_value(given)}: must be text")
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        for index, call in enumerate(calls):
            yield from _put_call(f"{path}.tool_calls[{index}]", call, into.tool_calls.add())
    elif calls is not None:
        yield FieldViolation(f"{path}.tool_calls", f"{shown_value(calls)}: must be a list")


def _put_call(path: str, call: Any, into: inference_pb2.ToolCall) -> Violations:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        fault = "must be an object with a name and arguments"
        yield FieldViolation(f"{path}.function", f"{shown_value(function)}: {fault}")
        return
    into.name = function["name"]
    into.id = call["id"] if isinstance(call.get("id"), str) else ""
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json_text(f"{path}.function.arguments", arguments, MAX_ARGUMENTS_CHARS)
    into.arguments = arguments


def _part_violations(path: str, parts: Sequence[Any]) -> Violations:
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            fault = f"{shown_value(kind)}: this model reads text only; send parts of type text"
            yield FieldViolation(f"{path}[{index}].type", fault)
        elif not isinstance(part.get(field), str):
            fault = f"{shown_value(part.get(field))}: must be text"
            yield FieldViolation(f"{path}[{index}].{field}", fault)


def choice_of_tools(tools: Sequence[Any] | None, choice: Any) -> ChoiceOfTools:
    """The tools and the choice among them. Raises InvalidRequest."""
    if choice not in (None, "none") and not tools:
        raise invalid("tool_choice", f"{shown_value(choice)}: goes with tools; give some")
    if tools and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"{len(tools)} tools: give at most {MAX_TOOLS}")
    described = tuple(_tool(index, tool) for index, tool in enumerate(tools or ()))
    functions = [tool["function"] for tool in tools or ()]
    schemas = {it["name"]: it.get("parameters") or {"type": "object"} for it in functions}
    match choice:
        case "none":
            return ChoiceOfTools()
        case None | "auto":
            return ChoiceOfTools(described, schemas)
        case "required":
            return ChoiceOfTools(described, schemas, is_forced=True)
        case {"type": "function", "function": {"name": str(name)}}:
            if all(tool.name != name for tool in described):
                raise invalid("tool_choice.function.name", f"{shown_value(name)}: is none of tools")
            return ChoiceOfTools(described, schemas, is_forced=True, name=name)
        case _:
            fault = (
                f"{shown_value(choice)}: must be none, auto, required, or the name of a function"
            )
            raise invalid("tool_choice", fault)


def _tool(index: int, tool: Any) -> inference_pb2.Tool:
    path = f"tools[{index}]"
    match tool:
        case {"type": "function", "function": {"name": str(name)} as function}:
            description, parameters = function.get("description"), function.get("parameters")
        case _:
            raise invalid(path, f"{shown_value(tool)}: must be of type function, with a name")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{path}.function.description", f"{shown_value(description)}: must be text")
    if parameters is not None and not isinstance(parameters, dict):
        fault = f"{shown_value(parameters)}: must be a JSON Schema, an object"
        raise invalid(f"{path}.function.parameters", fault)
    where = f"{path}.function.parameters"
    return inference_pb2.Tool(
        name=name,
        description=description or "",
        parameters=json_text(where, parameters, MAX_TOOL_CHARS) if parameters else "",
    )
