"""How a model's family writes tool calls and reasoning, and which tools a request allows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from baton.v1 import inference_pb2, sampling_pb2
from gateway.chat.harmony import ANSWERING, CHANNEL
from gateway.chat.reasoning import BEGIN, END
from gateway.chat.tool_message import has_place_for_tools
from gateway.chat.tools import TOOL_FORMATS, ToolFormat, format_of_template


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """Output format of a model, from its chat template or the gateway's options.

    tool_format: None disables tool parsing. has_thoughts: whether the model may reason before it
    answers. begins_with_thoughts: whether it always does, without a begin mark. is_harmony: see
    harmony.py. developer_role: the template's name of that role. has_place_for_tools: whether the
    template describes tools; otherwise see tool_message.py.
    """

    tool_format: ToolFormat | None
    has_thoughts: bool
    begins_with_thoughts: bool
    is_harmony: bool
    developer_role: str
    has_place_for_tools: bool = True

    def for_choice(self, choice: ChoiceOfTools) -> ChatStyle:
        """The style of one answer: a forced call is plain JSON, not harmony."""
        if self.is_harmony and choice.is_forced:
            return replace(self, is_harmony=False, has_thoughts=False)
        return self


def chat_style(template: str, tool_call_parser: str, reasoning_parser: str) -> ChatStyle:
    """Choose the parsers by name: "auto" uses the template, "none" disables."""
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
        has_place_for_tools=has_place_for_tools(template),
    )


@dataclass(frozen=True, slots=True)
class ChoiceOfTools:
    """Tools that the model may call. schemas: JSON Schemas of arguments by tool name. is_forced:
    whether it must call. name: the only tool allowed, if given."""

    tools: tuple[inference_pb2.Tool, ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_forced: bool = False
    name: str | None = None


def schema_of_calls(choice: ChoiceOfTools, *, is_parallel: bool) -> Mapping[str, Any]:
    """Schema of an output that is a forced call: the named tool's arguments, or a list of calls."""
    if choice.name is not None:
        return choice.schemas[choice.name]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": _moved(schema, f"#/items/anyOf/{index}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, (name, schema) in enumerate(choice.schemas.items())
    ]
    most = {} if is_parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


#: Keywords of JSON Schema with values of the document, and with schemas by name.
_OF_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)


def _moved(schema: Any, place: str) -> Any:
    """A schema to put at `place` within another, a JSON pointer: references to its own parts, such
    as `#/$defs/City`, point there."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value + "/").startswith("#/"):
            moved[key] = place + value[1:]
        elif key in _BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved(each, place) for name, each in value.items()}
        else:
            moved[key] = value if key in _OF_VALUES else _moved(value, place)
    return moved


def free_text_of(style: ChatStyle, choice: ChoiceOfTools) -> sampling_pb2.FreeText | None:
    """Text allowed before or instead of a structured answer: reasoning, or a tool call."""
    style = style.for_choice(choice)
    may_call = bool(choice.tools) and not choice.is_forced
    if style.is_harmony:
        return sampling_pb2.FreeText(end=ANSWERING, has_begun=True, may_be_all=may_call)
    free = sampling_pb2.FreeText()
    if style.has_thoughts:
        free.begin, free.end, free.has_begun = BEGIN, END, style.begins_with_thoughts
    if may_call and style.tool_format is not None:
        free.instead.extend(style.tool_format.marks)
        if style.tool_format.is_bare:
            free.instead.extend(f'{{"name": "{tool.name}"' for tool in choice.tools)
    return free if free.ListFields() else None
