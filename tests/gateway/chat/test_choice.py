"""A choice's tokens: which are reasoning, and which are the answer."""

from __future__ import annotations

from itertools import compress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.choice import ChatChoice, ChoiceOptions
from gateway.chat.style import ChoiceOfTools, chat_style

TEXTS = st.text("abc é<>/\n", max_size=12)
THINKING, HARMONY = (
    chat_style("</think>", "none", "auto"),
    chat_style("<|channel|>", "none", "auto"),
)


def choice(style: object = THINKING, *, is_reasoning: bool = False) -> ChatChoice:
    options = ChoiceOptions(style, ChoiceOfTools(), is_reasoning=is_reasoning)  # type: ignore[arg-type]
    return ChatChoice(options, lambda: "id")


@given(TEXTS, TEXTS, st.booleans(), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_tokens_between_the_marks_are_counted(
    thought: str, answer: str, opens: bool, cuts: list[int]
) -> None:
    """Marks that are tokens of their own, as in the models' vocabularies, count as neither."""
    before = [*thought]
    tokens = [] if opens else ["<think>"]
    tokens += [*before, "</think>", *answer]
    parser, raw, of_answer = choice(is_reasoning=opens), [t.encode() for t in tokens], []
    while raw:
        head, raw = raw[: cuts[0]], raw[cuts[0] :]
        cuts = [*cuts[1:], cuts[0]]
        of_answer += parser.count(head)
    assert parser.num_reasoning_tokens == len(before)
    assert [*compress(tokens, of_answer)] == [*answer]


@pytest.mark.parametrize(
    ("tokens", "num"),
    [
        (["<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "c"], 2),
        (["<|channel|>", "final", "<|message|>", "a", "b", "<|return|>"], 0),
    ],
)
def test_tokens_of_harmonys_thoughts_are_counted(tokens: list[str], num: int) -> None:
    parser = choice(HARMONY)
    parser.count(token.encode() for token in tokens)
    assert parser.num_reasoning_tokens == num


def test_without_thoughts_all_tokens_are_the_answer() -> None:
    parser = choice(chat_style("", "none", "none"))
    assert parser.count([b"<think>", b"x"]) == [True, True]
    assert parser.num_reasoning_tokens == 0


def test_what_is_left_of_a_forced_call_is_no_content() -> None:
    tools = ChoiceOfTools(("x",), {"x": {}}, is_forced=True)  # type: ignore[arg-type]
    parser = ChatChoice(ChoiceOptions(chat_style("", "auto", "none"), tools), lambda: "id")
    assert parser.delta('[{"na', is_last=True) == {}
