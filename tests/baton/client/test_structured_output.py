"""Structured output as callers write it: in the SDK and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.client import SamplingParams, StructuredOutput
from baton.client.requests import sampling_message
from baton.errors import InvalidRequest
from baton.v1 import sampling_pb2

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"é": {"type": "null"}}}


def structured_message(output: StructuredOutput) -> sampling_pb2.StructuredOutput:
    return sampling_message(SamplingParams(structured_output=output)).structured_output


@pytest.mark.parametrize("kind", ["json_schema", "json_object", "regex", "choice", "grammar"])
def test_each_kind_is_sent_alone(kind: str) -> None:
    values: dict[str, Any] = {"json_object": True, "choice": ["a", "b"]}
    sent = structured_message(StructuredOutput(**{kind: values.get(kind, "text")}))
    assert sent.WhichOneof("kind") == kind
    assert [field.name for field, _ in sent.ListFields()] == [kind]


def test_a_schema_is_a_mapping_or_its_text() -> None:
    as_mapping = structured_message(StructuredOutput(json_schema=SCHEMA)).json_schema
    assert json.loads(as_mapping) == SCHEMA
    assert structured_message(StructuredOutput(json_schema=as_mapping)).json_schema == as_mapping


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (StructuredOutput(regex="a", json_object=True), "json_object and regex are given"),
        (StructuredOutput(choice="abc"), "choice: is one text"),
        (StructuredOutput(choice=["a", "\ud800"]), r"values\[1\]: lone surrogate"),
        (StructuredOutput(regex="\ud800"), "regex: lone surrogate"),
        (StructuredOutput(json_schema={"a": object()}), "json_schema: cannot be written"),
        (StructuredOutput(json_object="yes"), "json_object: 'yes'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_sent_is_named(output: StructuredOutput, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        sampling_message(SamplingParams(structured_output=output))


def test_an_empty_choice_is_sent_for_the_server_to_refuse() -> None:
    assert structured_message(StructuredOutput(choice=[])).WhichOneof("kind") == "choice"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = f"@{tmp_path / 'missing.json'}"
    done = CliRunner().invoke(app, ["generate", "say", "--json-schema", missing])
    assert done.exit_code == 2
    assert "missing.json" in " ".join(done.output.split())
