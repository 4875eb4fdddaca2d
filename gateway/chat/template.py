"""A process that renders chat templates, killed if one does not end: python -m
gateway.chat.template

Start line: {"template": str, "special_tokens": {name: text}}. Question: {"messages": [{"role": str,
"num_chars": int}], "text": str}, with the contents of all messages concatenated in `text`. Optional
members: "fields", further fields of messages by index; "tools" and "kwargs", variables of the
template, or told in the system message if it has no place for them; "add_generation_prompt",
default true; "continues", true to end with the last message.
Answer: {"text": str} or {"error": str}. See gateway.intake.child_main.

The rendering of transformers without that package: a sandboxed jinja environment and what the
templates find in it. tests/gateway/chat/test_template.py compares the two.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gateway.chat.tool_message import has_place_for_tools, with_tools
from gateway.intake.child_main import Answer, limit_memory, serve

#: Maximum address space of the process, in bytes.
_MAX_MEMORY_BYTES = 4 * 2**30


class _Generation(Extension):
    """{% generation %}: training marks around the assistant's text; renders its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """namespace(...), without names that reach into the interpreter."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not set {name!r}: names do not begin with '_'")


class _Dict:
    """dict(...), without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - as templates expect, the machine's own time


def make_environment() -> ImmutableSandboxedEnvironment:
    """Sandboxed environment. Templates are code of the model's author."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


def _messages_of(question: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    end = 0
    for message in question["messages"]:
        start, end = end, end + message["num_chars"]
        messages.append({"role": message["role"], "content": question["text"][start:end]})
    for index, fields in question.get("fields", {}).items():
        messages[int(index)] |= fields
    return messages


def _up_to(content: str, rendered: str) -> str:
    """The text up to the end of the last message, which templates may strip."""
    text = content if content in rendered else content.strip()
    start = rendered.rfind(text)
    if start < 0:
        raise TemplateError("the last message cannot be continued: its text is not as it was given")
    return rendered[: start + len(text)]


def make_answer(start: Mapping[str, Any]) -> Answer:
    """See the module's docstring."""

    @functools.cache
    def template() -> Template:
        return make_environment().from_string(start["template"])

    def answer(question: Mapping[str, Any]) -> Mapping[str, str]:
        try:
            messages: list[Any] = _messages_of(question)
            if question.get("tools") and not has_place_for_tools(start["template"]):
                messages = with_tools(messages, question["tools"])
            is_continued = bool(question.get("continues"))
            variables = {
                "tools": question.get("tools"),
                "documents": None,
                "add_generation_prompt": question.get("add_generation_prompt", not is_continued),
                **start["special_tokens"],
                **question.get("kwargs", {}),
            }
            rendered = template().render(messages=messages, **variables)
            if is_continued:
                rendered = _up_to(messages[-1]["content"], rendered)
        except Exception as error:  # noqa: BLE001 - whatever a template raises is the answer
            return {"error": f"{type(error).__name__}: {error}"}
        return {"text": rendered}

    return answer


if __name__ == "__main__":
    limit_memory(_MAX_MEMORY_BYTES)
    serve(make_answer)
