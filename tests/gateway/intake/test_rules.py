"""What a request's structured_output may hold, before anything is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from baton.v1 import sampling_pb2
from gateway.intake.rules import ModelFacts, sampling_violations

FACTS = ModelFacts(
    "m", 100, 64, 48, frozenset((2,)), has_chat_template=True, max_num_seqs=8, max_token_chars=8
)
NO_END = ModelFacts(
    "m", 100, 64, 48, frozenset(), has_chat_template=True, max_num_seqs=8, max_token_chars=8
)


def params(beside: dict[str, Any] | None = None, **kind: Any) -> sampling_pb2.SamplingParams:
    if "choice" in kind:
        kind["choice"] = sampling_pb2.StringList(values=kind["choice"])
    output = sampling_pb2.StructuredOutput(**kind)
    return sampling_pb2.SamplingParams(structured_output=output, **(beside or {}))


def fields(asked: sampling_pb2.SamplingParams, facts: ModelFacts = FACTS) -> list[str]:
    found = list(sampling_violations(asked, facts))
    assert all(len(violation.description) < 200 for violation in found)
    return [violation.field.removeprefix("sampling.") for violation in found]


@pytest.mark.parametrize(
    "kind",
    [
        {"json_schema": "x" * 65_536},
        {"json_object": True},
        {"regex": "x" * 8_192},
        {"choice": ["x" * 1024] * 64},
        {"choice": [str(i) for i in range(1024)]},
        {"grammar": "x"},
    ],
)
def test_what_is_within_bounds_goes_to_the_compiler(kind: dict[str, Any]) -> None:
    assert fields(params(**kind)) == []


def test_a_request_without_one_has_no_such_violation() -> None:
    assert fields(sampling_pb2.SamplingParams(ignore_eos=True, min_tokens=3), NO_END) == []


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (params(), "structured_output"),
        (params(json_object=False), "structured_output.json_object"),
        (params(json_schema=""), "structured_output.json_schema"),
        (params(json_schema="x" * 65_537), "structured_output.json_schema"),
        (params(regex="x" * 8_193), "structured_output.regex"),
        (params(grammar=""), "structured_output.grammar"),
        (params(choice=[]), "structured_output.choice.values"),
        (params(choice=["x"] * 1025), "structured_output.choice.values"),
        (params(choice=["x", ""]), "structured_output.choice.values[1]"),
        (params(choice=["x" * 1025]), "structured_output.choice.values[0]"),
        (params(choice=["x" * 1024] * 65), "structured_output.choice.values"),
        (params({"ignore_eos": True}, regex="x"), "ignore_eos"),
        (params({"min_tokens": 1}, regex="x"), "min_tokens"),
    ],
)
def test_each_wrong_field_is_named_alone(asked: sampling_pb2.SamplingParams, field: str) -> None:
    assert fields(asked) == [field]


def test_an_output_needs_a_token_to_end_by() -> None:
    assert fields(params(regex="x"), NO_END) == ["stop_token_ids"]
    assert fields(params({"stop_token_ids": [5]}, regex="x"), NO_END) == []
