"""What fields of a body mean in a GenerateRequest, and how wrong ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from gateway.chat.style import chat_style
from gateway.http.chat import ChatBody, ChatFormat
from gateway.http.completions import CompletionBody, CompletionFormat
from gateway.http.json_body import MAX_NODES
from gateway.http.messages import MessagesBody, MessagesFormat
from gateway.http.responses import ResponsesBody, ResponsesFormat
from tests.support.http_bodies import parsed

STYLE = chat_style("", "auto", "auto")


def bytes_of(token_id: int) -> bytes:
    return b"%d" % token_id


def completion(body: Any) -> CompletionFormat:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return CompletionFormat(parsed(CompletionBody, data), bytes_of)


def chat(body: Any) -> ChatFormat:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ChatFormat(parsed(ChatBody, data), bytes_of, STYLE)


def refusal(make: Any, body: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        make(body)
    assert caught.value.violations
    return caught.value.violations[0].field


def test_fields_reach_the_request() -> None:
    form = completion(
        {
            "prompt": "x",
            "logit_bias": {"7": -2.5, "12": 100},
            "top_k": -1,
            "seed": -1,
            "stop": ["a", "b"],
            "stop_token_ids": [3],
            "bad_words": ["w"],
            "n": 2,
            "best_of": 3,
            "min_tokens": 1,
            "logprobs": 4,
            "echo": True,
            "priority": -7,
            "cache_salt": "s",
            "slo_class": "batch",
            "temperature": 1,
        }
    )
    (request,) = form.requests
    sampling = request.sampling
    assert dict(sampling.logit_bias) == {7: -2.5, 12: 100}
    assert (sampling.top_k, sampling.seed) == (0, 2**64 - 1)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["a", "b"], [3])
    assert (sampling.n, sampling.best_of, sampling.min_tokens) == (2, 3, 1)
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.echo) == (4, 4, True)
    assert (request.priority, request.cache_salt) == (-7, "s")
    assert request.slo_class == "batch"
    assert not sampling.HasField("top_p")


@pytest.mark.parametrize("asked", ["interactive", None])
def test_a_class_is_named_at_every_door(asked: str | None) -> None:
    def data(**fields: Any) -> bytes:
        return json.dumps({**fields, "max_tokens": 8, "slo_class": asked}).encode()

    messages = data(messages=[MESSAGE])
    forms = (
        CompletionFormat(parsed(CompletionBody, data(prompt="x")), bytes_of),
        ChatFormat(parsed(ChatBody, messages), bytes_of, STYLE),
        ResponsesFormat(parsed(ResponsesBody, data(input="x")), bytes_of, STYLE),
        MessagesFormat(parsed(MessagesBody, messages), bytes_of, STYLE),
    )
    assert [form.requests[0].slo_class for form in forms] == [asked or ""] * 4


@pytest.mark.parametrize("field", ["content", "summary"])
@pytest.mark.parametrize("parts", [5, True, "text", {"text": "a"}])
def test_parts_of_reasoning_are_a_list(field: str, parts: Any) -> None:
    def response(items: list[Any]) -> ResponsesFormat:
        body = parsed(ResponsesBody, json.dumps({"input": items}).encode())
        return ResponsesFormat(body, bytes_of, STYLE)

    user = {"role": "user", "content": "x"}
    assert refusal(response, [user, {"type": "reasoning", field: parts}]) == f"input[1].{field}"
    response([{"type": "reasoning", field: [5, {"text": "a"}]}, user])


def test_a_budget_of_thoughts_is_a_grammars() -> None:
    asked = {"messages": [MESSAGE], "thinking_token_budget": 5}
    style = chat_style("</think>", "auto", "auto")
    form = ChatFormat(parsed(ChatBody, json.dumps(asked).encode()), bytes_of, style)
    output = form.requests[0].sampling.structured_output
    assert (output.WhichOneof("kind"), output.free_text.max_tokens) == ("grammar", 5)
    asked |= {"response_format": {"type": "json_object"}}
    form = ChatFormat(parsed(ChatBody, json.dumps(asked).encode()), bytes_of, style)
    output = form.requests[0].sampling.structured_output
    assert (output.json_object, output.free_text.max_tokens) == (True, 5)
    assert refusal(chat, asked) == "thinking_token_budget", "no thoughts"
    unbound = ChatFormat(
        parsed(ChatBody, json.dumps({**asked, "thinking_token_budget": -1}).encode()),
        bytes_of,
        style,
    )
    assert not unbound.requests[0].sampling.structured_output.free_text.HasField("max_tokens")


def test_what_came_of_an_earlier_stream() -> None:
    so_far = {"choice": 1, "token_ids": [5, 6], "num_chars": 3, "has_ended": True}
    asked = {"seed": 1, "n": 2, "resume_from": [so_far]}
    for form in (completion({"prompt": "x", **asked}), chat({"messages": [MESSAGE], **asked})):
        (entry,) = form.requests[0].resume_from
        assert list(entry.token_ids) == [5, 6]
        assert (entry.choice, entry.num_chars, entry.has_ended) == (1, 3, True)
    tools = [{"type": "function", "function": {"name": "t"}}]
    body = {"messages": [MESSAGE], **asked, "tools": tools}
    assert refusal(chat, body) == "resume_from"
    assert refusal(completion, {"prompt": ["x", "y"], **asked}) == "resume_from"


def test_null_is_the_same_as_nothing() -> None:
    fields = set(CompletionBody.model_fields) - {"prompt"}
    with_nulls = completion({"prompt": "x", **dict.fromkeys(fields)}).requests
    assert with_nulls == completion({"prompt": "x"}).requests


def test_unknown_fields_are_passed_over_and_named() -> None:
    form = completion({"prompt": "x", "no_such_thing": {"a": 1}})
    assert form.body.unknown_fields == ("no_such_thing",)
    assert form.requests == completion({"prompt": "x"}).requests


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (b'{"prompt": "\xff\xfe"}', "body"),
        (b'{"prompt": "\\ud800"}', "body"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "seed": 1e400}', "seed"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "body"),
        (b"[" * (MAX_NODES + 1), "body"),
        ({"prompt": "x", "temperature": "1"}, "temperature"),
        ({"prompt": "x", "n": True}, "n"),
        ({"prompt": "x", "n": 2**40}, "n"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({"prompt": "x", "stop": [1]}, "stop"),
        ({"prompt": "x", "stop_token_ids": [2**33]}, "stop_token_ids[0]"),
        ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"prompt": "x", "priority": 2**40}, "priority"),
        ({"prompt": [1, -2]}, "prompt[1]"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x"] * 1000}, "prompt"),
        ({"prompt": "x", "stream_options": {"include_usage": 5}}, "stream_options.include_usage"),
        ({"prompt": "x", "structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"prompt": "x", "guided_choice": "a"}, "guided_choice"),
        ({"prompt": "x", "guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"prompt": "x", "logits_processors": ["x"]}, "logits_processors"),
    ],
)
def test_wrong_fields_of_completions(body: Any, field: str) -> None:
    assert refusal(completion, body) == field


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": [MESSAGE] * 2000}, "messages"),
        ({"messages": [MESSAGE, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0].type"),
        ({"messages": [{**MESSAGE, "tool_calls": 5}]}, "messages[0].tool_calls"),
        ({"messages": [{**MESSAGE, "tool_calls": [5]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [MESSAGE], "functions": [{}]}, "functions"),
        ({"messages": [MESSAGE], "tools": [5]}, "tools[0]"),
        ({"messages": [MESSAGE], "response_format": {"type": 5}}, "response_format.type"),
        ({"messages": [MESSAGE], "logprobs": 5}, "logprobs"),
    ],
)
def test_wrong_fields_of_chats(body: Any, field: str) -> None:
    assert refusal(chat, body) == field


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "x"]), inner
        )
    ),
    max_leaves=8,
)


def refusal_of(make: Any, body: Any) -> InvalidRequest | None:
    """Never another error: there is no 500 for what a client sends."""
    try:
        make(body)
    except InvalidRequest as error:
        return error
    return None


@given(st.dictionaries(st.sampled_from(sorted(CompletionBody.model_fields)), JSON))
def test_any_completion_is_a_request_or_an_invalid_one(body: dict[str, Any]) -> None:
    error = refusal_of(completion, body)
    assert error is None or (error.violations and len(error.message) < 2000)


@given(st.dictionaries(st.sampled_from(sorted(ChatBody.model_fields)), JSON), JSON)
def test_any_chat_is_a_request_or_an_invalid_one(body: dict[str, Any], message: Any) -> None:
    error = refusal_of(chat, {"messages": [message, MESSAGE], **body})
    assert error is None or (error.violations and len(error.message) < 2000)
