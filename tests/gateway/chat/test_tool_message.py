"""Tools where the chat template has no place for them: the model is told of them all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.chat.template import make_answer
from gateway.chat.tools import TOOL_FORMATS, CallArguments, CallBegins, ToolParser

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("clock", "weather")]
CALL = {"id": "1", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
TALK = [
    {"role": "user", "content": "when?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "now"},
]


def rendered(messages: list[dict[str, Any]], template: str = PLAIN, **more: Any) -> str:
    question = {
        "messages": [{"role": m["role"], "num_chars": len(m["content"])} for m in messages],
        "text": "".join(m["content"] for m in messages),
        "fields": {
            str(i): {"tool_calls": m["tool_calls"]}
            for i, m in enumerate(messages)
            if "tool_calls" in m
        },
        **more,
    }
    return make_answer({"template": template, "special_tokens": {}})(question)["text"]


def test_the_system_message_names_them() -> None:
    text = rendered(TALK, tools=TOOLS)
    assert text.startswith("<system>")
    assert all(json.dumps(tool["function"]) in text for tool in TOOLS)
    assert text.count("<user>when?") == text.count("<tool>now") == 1
    told = rendered([{"role": "system", "content": "Be kind."}, *TALK], tools=TOOLS)
    assert told == text.replace("<system>", "<system>Be kind.\n\n")


def test_calls_are_written_as_they_are_read() -> None:
    """What the model is shown of its own calls is in the format that is parsed."""
    text = rendered(TALK, tools=TOOLS).partition("<assistant>")[2].partition("<tool>")[0]
    begins, *rest = ToolParser(TOOL_FORMATS["hermes"], lambda: "id").feed(text)
    assert begins == CallBegins(0, "id", "clock")
    arguments = "".join(part.text for part in rest if isinstance(part, CallArguments))
    assert json.loads(arguments) == {"zone": "UTC"}


@pytest.mark.parametrize(
    ("template", "tools"), [(PLAIN, None), (PLAIN + "{{ tools | length }}", TOOLS)]
)
def test_without_tools_or_with_a_place_for_them_nothing_is_added(template: str, tools: Any) -> None:
    assert rendered(TALK, template, tools=tools).startswith("<user>when?<assistant><tool>now")
