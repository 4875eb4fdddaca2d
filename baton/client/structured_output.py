"""The message of a StructuredOutput. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from baton.client.params import StructuredOutput
from baton.client.text import checked_text
from baton.errors import FieldViolation, InvalidRequest
from baton.v1 import sampling_pb2

_FIELD = "sampling.structured_output"


def structured_message(output: StructuredOutput) -> sampling_pb2.StructuredOutput:
    """The message of one. Raises InvalidRequest for more than one constraint, and for what a
    message cannot carry."""
    kinds = ("json_schema", "json_object", "regex", "choice", "grammar")
    told = [kind for kind in kinds if getattr(output, kind) is not None]
    if len(told) > 1:
        raise _wrong("", f"{' and '.join(told)} are given; give one")
    message = sampling_pb2.StructuredOutput()
    if output.json_schema is not None:
        message.json_schema = checked_text(f"{_FIELD}.json_schema", _json(output.json_schema))
    if output.json_object is not None:
        if not isinstance(output.json_object, bool):
            raise _wrong(".json_object", f"{output.json_object!a:.80}: must be True")
        message.json_object = output.json_object
    if output.regex is not None:
        message.regex = checked_text(f"{_FIELD}.regex", output.regex)
    if output.choice is not None:
        if isinstance(output.choice, str):
            raise _wrong(".choice", "is one text; give a list of them")
        message.choice.values.extend(
            checked_text(f"{_FIELD}.choice.values[{i}]", text)
            for i, text in enumerate(output.choice)
        )
        message.choice.SetInParent()
    if output.grammar is not None:
        message.grammar = checked_text(f"{_FIELD}.grammar", output.grammar)
    return message


def _json(schema: Mapping[str, Any] | str) -> str:
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(dict(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(".json_schema", f"cannot be written as JSON: {error}") from error


def _wrong(path: str, description: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation(_FIELD + path, description))
