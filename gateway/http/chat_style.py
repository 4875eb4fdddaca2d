"""How a model's family writes calls of tools and thoughts, and what a request says of its tools.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.errors import FieldViolation, InvalidRequest
from baton.v1 import inference_pb2, sampling_pb2
from gateway.http.errors import shown_value
from gateway.http.harmony import ANSWERING, CHANNEL
from gateway.http.reasoning import BEGIN, END
from gateway.http.requests import json_text
from gateway.http.tools import TOOL_FORMATS, ToolFormat, format_of_template
from gateway.intake.rules import MAX_TOOL_CHARS, MAX_TOOLS


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """By the model's chat template, or by the gateway's options.

    tool_format: None if calls are not looked for. has_thoughts: whether the model may think before
    it answers. begins_with_thoughts: whether it always does, without a mark. is_harmony: whether
    its answers have harmony's form: see harmony.py. developer_role: what the template calls that
    role.
    """

    tool_format: ToolFormat | None
    has_thoughts: bool
    begins_with_thoughts: bool
    is_harmony: bool
    developer_role: str


def chat_style(template: str, tool_call_parser: str, reasoning_parser: str) -> ChatStyle:
    """The parsers: "auto" goes by the template, "none" is for none."""
    form = format_of_template(template) if tool_call_parser == "auto" else tool_call_parser
    is_thinking = reasoning_parser not in ("auto", "none")
    is_auto = reasoning_parser == "auto"
    is_harmony = reasoning_parser == "openai_gptoss" or (is_auto and CHANNEL in template)
    return ChatStyle(
        TOOL_FORMATS.get(form),
        has_thoughts=is_thinking or is_harmony or (is_auto and END in template),
        begins_with_thoughts=reasoning_parser == "deepseek_r1",
        is_harmony=is_harmony,
        developer_role="developer" if "developer" in template else "system",
    )


@dataclass(frozen=True, slots=True)
class ChoiceOfTools:
    """What the model may call. schemas: of arguments, JSON Schema, by name of tool. is_forced: it
    must. name: the only one it may, if that is said."""

    tools: tuple[inference_pb2.Tool, ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_forced: bool = False
    name: str | None = None


def choice_of_tools(tools: Sequence[Any] | None, choice: Any) -> ChoiceOfTools:
    """By `tools` and `tool_choice`. Raises InvalidRequest."""
    if choice not in (None, "none") and not tools:
        fault = f"{shown_value(choice)}: goes with tools; give some"
        raise InvalidRequest.of(FieldViolation("tool_choice", fault))
    if tools and len(tools) > MAX_TOOLS:
        fault = f"{len(tools)} tools: give at most {MAX_TOOLS}"
        raise InvalidRequest.of(FieldViolation("tools", fault))
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
                fault = f"{shown_value(name)}: is none of tools"
                raise InvalidRequest.of(FieldViolation("tool_choice.function.name", fault))
            return ChoiceOfTools(described, schemas, is_forced=True, name=name)
        case _:
            fault = (
                f"{shown_value(choice)}: must be none, auto, required, or the name of a function"
            )
            raise InvalidRequest.of(FieldViolation("tool_choice", fault))


def _tool(index: int, tool: Any) -> inference_pb2.Tool:
    path = f"tools[{index}]"
    match tool:
        case {"type": "function", "function": {"name": str(name)} as function}:
            description, parameters = function.get("description"), function.get("parameters")
        case _:
            fault = f"{shown_value(tool)}: must be of type function, with a name"
            raise InvalidRequest.of(FieldViolation(path, fault))
    if description is not None and not isinstance(description, str):
        fault = f"{shown_value(description)}: must be text"
        raise InvalidRequest.of(FieldViolation(f"{path}.function.description", fault))
    if parameters is not None and not isinstance(parameters, dict):
        fault = f"{shown_value(parameters)}: must be a JSON Schema, an object"
        raise InvalidRequest.of(FieldViolation(f"{path}.function.parameters", fault))
    where = f"{path}.function.parameters"
    return inference_pb2.Tool(
        name=name,
        description=description or "",
        parameters=json_text(where, parameters, MAX_TOOL_CHARS) if parameters else "",
    )


def schema_of_calls(choice: ChoiceOfTools, *, is_parallel: bool) -> Mapping[str, Any]:
    """What an output must be that calls: the arguments of the one that is named, or a list of
    calls."""
    if choice.name is not None:
        return choice.schemas[choice.name]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in choice.schemas.items()
    ]
    most = {} if is_parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


def free_text_of(style: ChatStyle, choice: ChoiceOfTools) -> sampling_pb2.FreeText | None:
    """What an answer may have beside the text that it was asked to be: thoughts before it, a call
    instead of it."""
    may_call = bool(choice.tools) and not choice.is_forced
    if style.is_harmony:
        if choice.is_forced:  # is not in harmony's form
            return None
        return sampling_pb2.FreeText(end=ANSWERING, has_begun=True, may_be_all=may_call)
    free = sampling_pb2.FreeText()
    if style.has_thoughts:
        free.begin, free.end, free.has_begun = BEGIN, END, style.begins_with_thoughts
    if may_call and style.tool_format is not None:
        free.instead.extend(style.tool_format.marks)
        if style.tool_format.is_bare:
            free.instead.extend(f'{{"name": "{tool.name}"' for tool in choice.tools)
    return free if free.ListFields() else None
