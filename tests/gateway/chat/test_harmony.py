"""gpt-oss's answers: thoughts, text and calls found alike, however the output is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import inference_pb2, sampling_pb2
from gateway.chat.harmony import HarmonyParser
from gateway.chat.style import chat_style
from gateway.chat.tools import CallArguments, CallBegins, Content, Part, Thought
from gateway.http.chat import ChatBody, ChatFormat
from gateway.http.requests import validated

#: What ends a message, or begins the next.
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")

#: What a model may write into a message: anything but those.
TEXTS = st.text(alphabet="ab <|>\n=:{}endcaltorsu", max_size=12).filter(
    lambda text: not any(mark in text for mark in ENDS)
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_.-]{0,9}", fullmatch=True)
MESSAGES = st.lists(
    st.tuples(st.sampled_from(["analysis", "commentary", "final"]), TEXTS)
    | st.tuples(NAMES.map(lambda name: f"call {name}"), TEXTS),
    max_size=5,
)
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def written(messages: Sequence[tuple[str, str]], *, name_first: bool = False) -> str:
    """As the model writes them behind a prompt that ends with <|start|>assistant."""
    pieces = []
    for kind, text in messages:
        name = kind.removeprefix("call ")
        if name == kind:
            pieces.append(f"<|channel|>{kind}<|message|>{text}<|end|>")
        elif name_first:
            pieces.append(
                f" to=functions.{name}<|channel|>commentary json<|message|>{text}<|call|>"
            )
        else:
            header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            pieces.append(f"{header}{text}<|call|>")
    return "<|start|>assistant".join(pieces)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    pieces, start = [], 0
    for number in range(len(text)):
        if start >= len(text):
            break
        end = start + cuts[number % len(cuts)]
        pieces.append(text[start:end])
        start = end
    return pieces


def parsed(
    pieces: Sequence[str], *, has_calls: bool = True, is_thinking: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, text, and calls by name and arguments."""
    ids = count()
    parser = HarmonyParser(lambda: f"id-{next(ids)}", has_calls=has_calls, is_thinking=is_thinking)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    parts += parser.end()
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case CallBegins(index, call_id, name):
                assert (index, call_id) == (len(calls), f"id-{len(calls)}")
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    assert parser.num_calls == len(calls)
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    return thoughts, "".join(part.text for part in parts if isinstance(part, Content)), calls


@given(MESSAGES, CUTS, st.booleans())
def test_messages_are_told_apart_however_the_output_is_cut(
    messages: list[tuple[str, str]], cuts: list[int], name_first: bool
) -> None:
    text = written(messages, name_first=name_first)
    found = parsed(pieces_of(text, cuts))
    assert found == parsed([text])
    thoughts = [text for kind, text in messages if kind == "analysis" and text]
    contents = [text for kind, text in messages if kind in ("commentary", "final") and text]
    calls = [(k.removeprefix("call "), text) for k, text in messages if k.startswith("call ")]
    assert found == ("\n".join(thoughts), "\n".join(contents), calls)


@given(TEXTS, CUTS)
def test_what_does_not_begin_as_a_header_is_text(text: str, cuts: list[int]) -> None:
    """A grammar leaves no room for headers."""
    answer = json.dumps({"x": text})
    assert parsed(pieces_of(answer, cuts)) == ("", answer, [])


@given(st.integers(0, 40))
def test_an_output_that_breaks_off_keeps_what_it_said(num_tokens: int) -> None:
    text = written([("analysis", "so it is"), ("final", "it is so")])
    tokens = re.findall(r"<\|\w+\|>|.", text)  # marks are tokens of their own
    thoughts, content, calls = parsed(tokens[:num_tokens])
    assert "so it is".startswith(thoughts)
    assert "it is so".startswith(content)
    assert not calls


def test_a_prompt_may_end_within_the_thoughts() -> None:
    text = "so<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    assert parsed([text], is_thinking=True) == ("so", "yes", [])


def test_a_call_without_tools_is_text() -> None:
    text = written([("call f", "{}")])
    assert parsed([text], has_calls=False) == ("", "{}", [])


@pytest.mark.parametrize(
    ("template", "parser", "is_harmony"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", "auto", True),
        ("<|im_start|>assistant", "auto", False),
        ("<|im_start|>assistant", "openai_gptoss", True),
        ("<|start|>assistant<|channel|>final<|message|>", "none", False),
    ],
)
def test_the_style_goes_by_the_template_or_the_option(
    template: str, parser: str, is_harmony: bool
) -> None:
    style = chat_style(template, "auto", parser)
    assert style.is_harmony == style.has_thoughts == is_harmony


def test_a_chat_has_them_as_openai_names_them() -> None:
    tool = {"type": "function", "function": {"name": "get_time"}}
    asked = {"messages": [{"role": "user", "content": "when?"}], "tools": [tool]}
    style = chat_style("<|start|>assistant<|channel|>", "auto", "auto")
    form = ChatFormat(validated(ChatBody, asked), lambda token_id: b"%d" % token_id, style)
    # The marks are special tokens.
    assert not form.requests[0].sampling.skip_special_tokens
    assert form.requests[0].sampling.HasField("skip_special_tokens")
    text = written(
        [("analysis", "hm"), ("commentary", "Wait."), ("call get_time", '{"in":"Oslo"}')]
    )
    chunk = inference_pb2.GenerateResponse(text=text, finish_reason=sampling_pb2.FINISH_REASON_STOP)
    (choice,) = form.document([[chunk]], {})["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Wait.")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_time", "arguments": '{"in":"Oslo"}'}
    assert choice["finish_reason"] == "tool_calls"
