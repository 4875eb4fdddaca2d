"""Violations carry the client's own field names."""

from __future__ import annotations

import pytest

from baton.errors import FieldViolation, InvalidRequest
from gateway.http.chat import ChatBody
from gateway.http.errors import in_words_of, names_in
from tests.support.http_bodies import parsed

MESSAGES = b'"messages": [{"role": "user", "content": "x"}]'


def names_of(body: ChatBody, field: str) -> str:
    return names_in(body)(field)


def test_a_field_fills_its_path_and_what_lies_within() -> None:
    body = parsed(ChatBody, b'{%s, "guided_regex": "a"}' % MESSAGES)
    path = "sampling.structured_output"
    assert names_of(body, path) == "guided_regex"
    assert names_of(body, f"{path}.regex") == "guided_regex.regex"
    assert names_of(body, f"{path}s") == "structured_outputs", "another field's name"


def test_a_field_that_fills_nothing_by_its_value_is_not_named() -> None:
    body = parsed(ChatBody, b'{%s, "response_format": {"type": "text"}}' % MESSAGES)
    assert names_of(body, "sampling.structured_output") == "structured_output"
    body = parsed(ChatBody, b'{%s, "response_format": {"type": "json_object"}}' % MESSAGES)
    assert names_of(body, "sampling.structured_output") == "response_format"


def test_a_renamed_error_keeps_its_request_id() -> None:
    error = InvalidRequest.of(FieldViolation("sampling.n", "0: from 1 on"))
    error.request_id = "r-1"
    with (
        pytest.raises(InvalidRequest) as caught,
        in_words_of(lambda field: field.removeprefix("sampling.")),
    ):
        raise error
    assert caught.value.violations == (FieldViolation("n", "0: from 1 on"),)
    assert caught.value.request_id == "r-1"
