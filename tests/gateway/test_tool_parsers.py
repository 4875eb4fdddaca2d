"""Calls of tools and thoughts in a model's output: found alike, however the output is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.reasoning import ReasoningSplitter
from gateway.http.tools import (
    REQUIRED_FORMAT,
    TOOL_FORMATS,
    CallArguments,
    CallBegins,
    Content,
    ToolFormat,
    ToolParser,
    format_of_template,
)

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

Calls = Sequence[tuple[str, object]]


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


def parse(form: ToolFormat | None, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and each call's name and arguments. Checks that parts of a call follow its
    beginning, and calls each other."""
    numbers = count()
    parser = ToolParser(form, lambda: f"call_{next(numbers)}")
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


def test_a_template_shows_its_format() -> None:
    assert format_of_template("... <tool_call> ...") == "hermes"
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
