"""Calls of tools and thoughts in a model's output: found alike, however the output is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.chat.reasoning import ReasoningSplitter
from gateway.chat.style import chat_style
from gateway.chat.tools import (
    REQUIRED_FORMAT,
    TOOL_FORMATS,
    CallArguments,
    CallBegins,
    Content,
    ToolFormat,
    ToolParser,
    format_of_template,
)
from gateway.http.chat import ChatBody, ChatFormat
from gateway.http.requests import validated

NAMES = st.from_regex(r"[a-z_][a-z0-9_.-]{0,12}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


Schemas = Mapping[str, Mapping[str, Any]]
TYPE_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    list: "array",
    dict: "object",
    type(None): "null",
}
Calls = Sequence[tuple[str, Mapping[str, object]]]

#: Arguments as models can write them that put them between marks: names without "<", text without
#: a mark, and no more than one parameter of a name.
TAGGED_KEYS = st.from_regex(r"[a-z_][a-z0-9_.-]{0,6}", fullmatch=True)
TAGGED_TEXT = st.text(alphabet='</arg_value>pmetr \n"\\é{}0', max_size=14).filter(
    lambda text: "</" not in text
)
TAGGED_VALUES = TAGGED_TEXT | st.sampled_from([None, True, -3, [1, "</"], {"a": "\n"}, {}])
TAGGED_CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(TAGGED_KEYS, TAGGED_VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


def hermes(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls
    )


def hermes_other_order(calls: Calls) -> str:
    return "".join(
        f"<tool_call>{json.dumps({'arguments': a, 'id': '}', 'name': n})}</tool_call>"
        for n, a in calls
    )


def llama(calls: Calls) -> str:
    return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


def mistral(calls: Calls) -> str:
    return f"[TOOL_CALLS]{json.dumps([{'name': n, 'arguments': a} for n, a in calls])}"


def mistral_named(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)


def deepseek(calls: Calls) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```"  # noqa: RUF001
        "<｜tool▁call▁end｜>"  # noqa: RUF001
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"  # noqa: RUF001


def deepseek_newer(calls: Calls) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>"  # noqa: RUF001
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"  # noqa: RUF001


def kimi(calls: Calls) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{json.dumps(a)}"
        "<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def required(calls: Calls) -> str:
    return json.dumps([{"name": n, "arguments": a} for n, a in calls])


def text_arguments(calls: Calls) -> str:
    """Arguments as a string of JSON, as some models write them."""
    return hermes([(n, json.dumps(a)) for n, a in calls])


def tagged(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def glm(calls: Calls, space: str = "\n") -> str:
    return space.join(
        f"<tool_call>{n}{space}"
        + "".join(
            f"<arg_key>{k}</arg_key>{space}<arg_value>{tagged(v)}</arg_value>{space}"
            for k, v in a.items()
        )
        + "</tool_call>"
        for n, a in calls
    )


def glm_in_one_line(calls: Calls) -> str:
    return glm(calls, space="")


def qwen_coder(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{it}\n</tool_call>" for it in qwen_functions(calls))


def qwen_coder_without_outer_mark(calls: Calls) -> str:
    return "\n".join(qwen_functions(calls))


def qwen_functions(calls: Calls) -> list[str]:
    return [
        f"<function={n}>\n"
        + "".join(f"<parameter={k}>\n{tagged(v)}\n</parameter>\n" for k, v in a.items())
        + "</function>"
        for n, a in calls
    ]


WRITERS = [
    (hermes, TOOL_FORMATS["hermes"]),
    (hermes_other_order, TOOL_FORMATS["hermes"]),
    (text_arguments, TOOL_FORMATS["hermes"]),
    (llama, TOOL_FORMATS["llama3_json"]),
    (mistral, TOOL_FORMATS["mistral"]),
    (mistral_named, TOOL_FORMATS["mistral"]),
    (deepseek, TOOL_FORMATS["deepseek_v3"]),
    (deepseek_newer, TOOL_FORMATS["deepseek_v3"]),
    (kimi, TOOL_FORMATS["kimi_k2"]),
    (required, REQUIRED_FORMAT),
]


def cut_up(text: str, cuts: Sequence[int]) -> list[str]:
    pieces, start = [], 0
    while start < len(text):
        num = cuts[len(pieces) % len(cuts)]
        pieces.append(text[start : start + num])
        start += num
    return pieces


def parse(
    form: ToolFormat | None, pieces: Sequence[str], schemas: Schemas = MappingProxyType({})
) -> tuple[str, list[tuple[str, str]]]:
    """Content, and each call's name and arguments. Checks that parts of a call follow its
    beginning, and calls each other."""
    numbers = count()
    parser = ToolParser(form, lambda: f"call_{next(numbers)}", schemas=schemas)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    content, calls = "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case Content(text):
                assert text
                content += text
            case CallBegins(index, call_id, name):
                assert index == len(calls)
                assert call_id
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    assert parser.num_calls == len(calls)
    return content, calls


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(("write", "form"), WRITERS, ids=lambda it: getattr(it, "__name__", ""))
@settings(max_examples=40)
@given(calls=CALLS, cuts=CUTS)
def test_calls_are_found_however_the_output_is_cut(
    write: object, form: ToolFormat, calls: Calls, cuts: list[int]
) -> None:
    assert callable(write)
    content, found = parse(form, cut_up(write(calls), cuts))
    assert content == ""
    assert [(name, json.loads(text)) for name, text in found] == list(calls)


def schemas_of(calls: Calls) -> Schemas:
    """Tools with arguments of the types that calls give them."""
    names: dict[str, dict[str, set[str]]] = {}
    for tool, arguments in calls:
        types = names.setdefault(tool, {})
        for name, value in arguments.items():
            types.setdefault(name, set()).add(TYPE_NAMES[type(value)])
    return {
        tool: {"properties": {name: {"type": list(of_one)} for name, of_one in types.items()}}
        for tool, types in names.items()
    }


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("write", "form"),
    [
        (glm, "glm45"),
        (glm_in_one_line, "glm45"),
        (qwen_coder, "qwen3_coder"),
        (qwen_coder_without_outer_mark, "qwen3_coder"),
    ],
)
@settings(max_examples=25)
@given(calls=TAGGED_CALLS, cuts=CUTS, before=st.text(alphabet="ab \n", max_size=6))
def test_arguments_between_marks_are_what_the_schema_says(
    write: Callable[[Calls], str], form: str, calls: Calls, cuts: list[int], before: str
) -> None:
    # One type of a parameter in all calls: else an argument that could be several is none's own.
    schemas = schemas_of(calls)
    assume(all(len(p["type"]) == 1 for it in schemas.values() for p in it["properties"].values()))
    content, found = parse(TOOL_FORMATS[form], cut_up(before + write(calls), cuts), schemas)
    assert content.strip() == before.strip()
    assert [(name, json.loads(text)) for name, text in found] == [*calls]


@given(
    text=st.lists(
        st.sampled_from(
            (
                *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"),
                *("</arg_value>", "<function=", "<parameter=", ">", "</parameter>"),
                *("</function>", "f", "\n", " ", "<"),
            )
        ),
        max_size=16,
    ),
    cuts=CUTS,
)
def test_what_is_found_between_marks_does_not_depend_on_the_cuts(
    text: list[str], cuts: list[int]
) -> None:
    for name in ("glm45", "qwen3_coder"):
        whole = "".join(text)
        assert parse(TOOL_FORMATS[name], cut_up(whole, cuts)) == parse(TOOL_FORMATS[name], [whole])


@given(text=st.text(alphabet='<tol_ca>{}[]TOO: "\\n|x', max_size=60), cuts=CUTS)
def test_text_without_calls_is_not_changed(text: str, cuts: list[int]) -> None:
    for name, form in TOOL_FORMATS.items():
        if any(mark in text for mark in form.marks):
            continue
        content, calls = parse(form, cut_up(text, cuts))
        assert calls == []
        # Space alone before nothing may go.
        assert content == text or not text.strip(), name


@given(text=st.text(max_size=40), cuts=CUTS)
def test_text_around_a_call_is_content(text: str, cuts: list[int]) -> None:
    if "<" in text:
        return
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    content, calls = parse(TOOL_FORMATS["hermes"], cut_up(text + call, cuts))
    assert calls == [("f", "{}")]
    assert content.strip() == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no object",
        "<tool_call>no object {}",
        '<tool_call>{"nome": 1}</tool_call>',
        '<tool_call>{"name": 7}</tool_call>',
        '<tool_call>{"name',
        "<tool_call>" + "x" * 300,
        "<tool_",
        "<tool_call>",
    ],
)
@pytest.mark.parametrize("num", [1, 3, 1000])
def test_what_only_begins_like_a_call_is_content(text: str, num: int) -> None:
    assert parse(TOOL_FORMATS["hermes"], cut_up(text, [num])) == (text, [])


def test_arguments_come_before_the_call_is_whole() -> None:
    parser = ToolParser(TOOL_FORMATS["hermes"], lambda: "call_0")
    parts = parser.feed('<tool_call>{"name": "f", "arguments": {"text": "a long')
    assert parts[1:] == [CallArguments(0, '{"text": "a long')]


def test_text_between_marks_comes_before_it_is_whole() -> None:
    schema = {"properties": {"text": {"type": "string"}, "num": {"type": "integer"}}}
    for name, text, number in (
        (
            "glm45",
            "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a long\n",
            "</arg_value><arg_key>num</arg_key><arg_value>12",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=text>\na long\nt",
            "\n</parameter>\n<parameter=num>\n12",
        ),
    ):
        parser = ToolParser(TOOL_FORMATS[name], lambda: "call_0", schemas={"f": schema})
        arguments = "".join(p.text for p in parser.feed(text) if isinstance(p, CallArguments))
        assert arguments.startswith('{"text": "a long\\n')
        arguments += "".join(p.text for p in parser.feed(number) if isinstance(p, CallArguments))
        assert arguments.endswith(', "num": ')


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, '"quoted"', '"quoted"'),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five", "five"),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "array"}, "['a', \"it's\"]", ["a", "it's"]),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "object"}, "{'a': {1, 2}}", "{'a': {1, 2}}"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "auto"]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"$ref": "#/$defs/Color"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/Color"}]}, "1", "1"),
        ({"$ref": "#/$defs/Loop"}, "[1]", [1]),
        ({"type": [{}]}, "[1]", [1]),
        (7, "[1]", [1]),
    ],
)
def test_a_value_is_of_the_type_that_its_schema_says(schema: Any, text: str, value: object) -> None:
    definitions = {"Color": {"enum": ["1", "2"]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}}
    schemas = {"f": {"properties": {"x": schema}, "$defs": definitions}}
    _, ((_, arguments),) = parse(TOOL_FORMATS["glm45"], [glm([("f", {"x": text})])], schemas)
    assert json.loads(arguments) == {"x": value}


def test_a_chat_reads_arguments_by_the_schemas_of_its_tools() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}, "y": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    style = chat_style("<tool_call><arg_key>", "auto", "auto")
    form = ChatFormat(validated(ChatBody, body), lambda _: b"", style)
    delta = form.new_choice(0).delta(glm([("f", {"x": "5", "y": 5})]), is_last=True)
    (call,) = delta["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"x": "5", "y": 5}


def test_what_has_no_schema_is_text_to_qwen_coder_and_json_to_glm() -> None:
    calls = [("f", {"x": "5", "y": "five"})]
    for form, write, value in (("glm45", glm, 5), ("qwen3_coder", qwen_coder, "5")):
        _, ((_, arguments),) = parse(TOOL_FORMATS[form], [write(calls)])
        assert json.loads(arguments) == {"x": value, "y": "five"}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("glm45", "<tool_call>f <b>"),
        ("glm45", "<tool_call>f"),
        ("glm45", "<tool_call>f <arg_key>k</arg_key>"),
        ("glm45", "<tool_call>f <arg_key>" + "k" * 400),
        ("glm45", "<tool_call>a b</tool_call>"),
        ("qwen3_coder", "<tool_call>\n"),
        ("qwen3_coder", "Write <function=f> in front"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<b>"),
        ("qwen3_coder", "<tool_call>\n<function=a b>\n</function>"),
    ],
)
@pytest.mark.parametrize("num", [1, 3, 1000])
def test_what_only_begins_like_a_call_between_marks_is_content(
    form: str, text: str, num: int
) -> None:
    assert parse(TOOL_FORMATS[form], cut_up(text, [num])) == (text, [])


def test_a_call_after_a_mark_that_began_none_is_found() -> None:
    for form, write in (("glm45", glm), ("qwen3_coder", qwen_coder)):
        content, calls = parse(TOOL_FORMATS[form], ["<tool_call>f " + write([("g", {})])])
        assert (content.strip(), calls) == ("<tool_call>f", [("g", "{}")])


def test_a_template_shows_its_format() -> None:
    assert format_of_template("... <tool_call> ...") == "hermes"
    assert format_of_template("<tool_call>{{ name }}<arg_key>") == "glm45"
    assert format_of_template("<tool_call><function=f><parameter=x>") == "qwen3_coder"
    assert format_of_template("[TOOL_CALLS]") == "mistral"
    assert format_of_template("<|python_tag|>") == "llama3_json"
    assert format_of_template("<｜tool▁calls▁begin｜>") == "deepseek_v3"  # noqa: RUF001
    assert format_of_template("<|tool_calls_section_begin|>") == "kimi_k2"
    assert format_of_template("") == "hermes"


THOUGHTS = st.text(alphabet="</think>ab \n", max_size=20).filter(lambda t: "</think>" not in t)


@given(thought=THOUGHTS, answer=st.text(max_size=20), cuts=CUTS, opens=st.booleans())
def test_thoughts_are_separated(thought: str, answer: str, cuts: list[int], opens: bool) -> None:
    answer = answer.lstrip("\n")
    # A thought's end must not become a part of the mark.
    thought += "."
    splitter = ReasoningSplitter(is_reasoning=not opens)
    text = f"{'<think>' if opens else ''}{thought}</think>{answer}"
    parts = [splitter.feed(piece) for piece in cut_up(text, cuts)] + [splitter.end()]
    assert "".join(t for t, _ in parts) == thought
    # The newline after the mark is none of the answer, where it comes with it.
    assert "".join(a for _, a in parts) == answer


@given(answer=st.text(max_size=20), cuts=CUTS)
def test_an_answer_without_thoughts_is_not_changed(answer: str, cuts: list[int]) -> None:
    splitter = ReasoningSplitter(is_reasoning=False)
    parts = [splitter.feed(piece) for piece in cut_up(answer, cuts)] + [splitter.end()]
    assert "".join(a for _, a in parts) == answer or answer.lstrip().startswith("<think>")
