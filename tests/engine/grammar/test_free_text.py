"""Thoughts before a constrained text, and calls instead of one: what of an output is free, and what
is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from baton.v1 import sampling_pb2
from engine.grammar import FreeText, Grammar, GrammarVocabulary, Matcher, load_vocabulary
from engine.grammar.matcher import compile_grammar
from gateway.chat.style import ChoiceOfTools, chat_style, free_text_of
from gateway.http.conversation import choice_of_tools
from gateway.intake.grammars import GrammarCompiler

MODEL = Path(__file__).parents[3] / "models" / "baton-py-6m"
MARKS = ("<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>")
END_ID = 0

ANSWER = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
JSON = '{"a": 1}'
TOOLS = choice_of_tools([{"type": "function", "function": {"name": "f"}}], "auto")

QWEN = free_text_of(chat_style("</think>", "none", "auto"), ChoiceOfTools())
R1 = free_text_of(chat_style("", "none", "deepseek_r1"), ChoiceOfTools())
OSS = free_text_of(chat_style("<|channel|>", "none", "auto"), ChoiceOfTools())
OSS_TOOLS = free_text_of(chat_style("<|channel|>", "none", "auto"), TOOLS)
HERMES = free_text_of(chat_style("", "hermes", "none"), TOOLS)
LLAMA = free_text_of(chat_style("", "llama3_json", "none"), TOOLS)
QWEN_TOOLS = free_text_of(chat_style("</think>", "hermes", "auto"), TOOLS)

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.fixture(scope="module", params=["marks are tokens", "marks are text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    if request.param == "marks are tokens":
        tokenizer.add_special_tokens(list(MARKS))
    made = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> GrammarVocabulary:
    return load_vocabulary(folder)


def taken(grammar: Grammar, vocabulary: GrammarVocabulary, text: str) -> bool:
    """Whether an output may be this text, whole. Each token is taken back once, as a draft is."""
    matcher = Matcher(compile_grammar(grammar, vocabulary), vocabulary, (END_ID,))
    for token_id in vocabulary.tokenizer.tokenize_str(text, parse_special=True):
        if not matcher.allows(token_id):
            return False
        matcher.advance(token_id)
        matcher.rollback(1)
        matcher.advance(token_id)
    return matcher.is_complete


def free_text(message: sampling_pb2.FreeText | None) -> FreeText:
    assert message is not None
    return FreeText(
        message.begin, message.end, message.has_begun, message.may_be_all, tuple(message.instead)
    )


@pytest.mark.parametrize(
    ("message", "text", "expected"),
    [
        (QWEN, JSON, True),
        (QWEN, f"<think>Well, {{}}</think>{JSON}", True),
        (QWEN, f"<think>Well</think>\n\n{JSON}", True),
        (QWEN, f"Well</think>{JSON}", False),
        (QWEN, "Well", False),
        (QWEN, "<think>Well", False),
        (QWEN, "<think>Well</think>no", False),
        (R1, f"Well\n</think>\n\n{JSON}", True),
        (R1, f"</think>{JSON}", True),
        (R1, JSON, False),
        (HERMES, JSON, True),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {}}</tool_call>', True),
        (HERMES, "So: <tool_call>", False),
        (LLAMA, '{"name": "f", "parameters": {"x": 1}}', True),
        (LLAMA, '{"name": "g", "parameters": {"x": 1}}', False),
        (LLAMA, '<|python_tag|>{"name": "f"', True),
        (QWEN_TOOLS, f"<think>a</think>{JSON}", True),
        (QWEN_TOOLS, "<think>a</think>\n\n<tool_call>{", True),
        (QWEN_TOOLS, "<think>a</think>So", False),
    ],
)
def test_the_constraint_holds_for_the_answer_alone(
    vocabulary: GrammarVocabulary,
    message: sampling_pb2.FreeText | None,
    text: str,
    *,
    expected: bool,
) -> None:
    grammar = free_text(message).around(ANSWER, vocabulary.tokenizer)
    assert taken(Grammar.from_bytes(grammar.to_bytes()), vocabulary, text) == expected


@pytest.mark.parametrize(
    ("message", "text", "expected"),
    [
        (OSS, f"{THOUGHT}{FINAL}{JSON}", True),
        (OSS, f"{FINAL}{JSON}", True),
        (OSS, JSON, False),
        (OSS, THOUGHT, False),
        (OSS, f"{THOUGHT}{FINAL}no", False),
        (OSS_TOOLS, f"{THOUGHT}{FINAL}{JSON}", True),
        (OSS_TOOLS, f"{THOUGHT}{FINAL}no", False),
        (OSS_TOOLS, f"{THOUGHT}<|channel|>commentary to=functions.f<|message|>{{}}", True),
    ],
)
@pytest.mark.parametrize("folder", ["marks are tokens"], indirect=True)
def test_of_harmony_it_holds_for_the_final_message_alone(
    vocabulary: GrammarVocabulary,
    message: sampling_pb2.FreeText | None,
    text: str,
    *,
    expected: bool,
) -> None:
    grammar = free_text(message).around(ANSWER, vocabulary.tokenizer)
    assert taken(grammar, vocabulary, text) == expected


@pytest.mark.parametrize(
    "answer",
    [
        Grammar.regex("[0-9]{2}"),
        Grammar.choice(["42", "forty-two"]),
        Grammar.lark('start: "4" start | "2"'),
    ],
)
def test_of_any_kind(vocabulary: GrammarVocabulary, answer: Grammar) -> None:
    grammar = free_text(QWEN).around(answer, vocabulary.tokenizer)
    assert taken(grammar, vocabulary, "42")
    assert taken(grammar, vocabulary, "<think>what?</think>42")
    assert not taken(grammar, vocabulary, "<think>what?</think>what?")


@pytest.mark.parametrize("most", [0, 1, 5])
@pytest.mark.parametrize("folder", ["marks are tokens"], indirect=True)
def test_a_budget_ends_the_thoughts(vocabulary: GrammarVocabulary, most: int) -> None:
    """After so many tokens only the mark may come; fewer are as good."""
    tokenizer = vocabulary.tokenizer
    grammar = replace(free_text(QWEN), max_tokens=most).around(ANSWER, tokenizer)
    matcher = Matcher(compile_grammar(grammar, vocabulary), vocabulary, (END_ID,))
    (begin,), (end,) = (tokenizer.tokenize_str(mark, parse_special=True) for mark in MARKS[:2])
    matcher.advance(begin)
    for _ in range(most):
        assert matcher.allows(end)
        matcher.advance(300)
    assert matcher.allowed() == vocabulary.to_bytes(1 << end)
    assert taken(grammar, vocabulary, f"<think></think>{JSON}")
    assert taken(grammar, vocabulary, JSON)


@pytest.mark.parametrize("folder", ["marks are text"], indirect=True)
def test_a_budget_needs_a_mark_of_one_token(vocabulary: GrammarVocabulary) -> None:
    with pytest.raises(ValueError, match="is not one token"):
        replace(free_text(QWEN), max_tokens=5).around(ANSWER, vocabulary.tokenizer)


@pytest.mark.few_cases(1)
async def test_the_compiler_makes_it_of_the_message(
    folder: Path, vocabulary: GrammarVocabulary
) -> None:
    compiler = GrammarCompiler(folder, compile_timeout_s=300.0)
    try:
        thinking, thoughtful = [
            Grammar.from_bytes(
                await compiler.compile(
                    sampling_pb2.StructuredOutput(json_schema=ANSWER.text, free_text=message)
                )
            )
            for message in (QWEN, R1)
        ]
    finally:
        await compiler.close()
    assert taken(thinking, vocabulary, JSON)
    assert not taken(thoughtful, vocabulary, JSON)
    assert taken(thoughtful, vocabulary, f"so</think>{JSON}")


def test_what_must_be_called_leaves_no_room_for_other_calls() -> None:
    forced = ChoiceOfTools(TOOLS.tools, is_forced=True)
    assert free_text_of(chat_style("", "hermes", "none"), forced) is None
    assert free_text_of(chat_style("<|channel|>", "none", "auto"), forced) is None
    thinking = free_text_of(chat_style("</think>", "hermes", "auto"), forced)
    assert thinking is not None
    assert not thinking.instead
