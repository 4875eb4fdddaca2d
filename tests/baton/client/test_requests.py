"""Requests are sent as asked; what cannot be sent is refused by the name of its field."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal, get_type_hints

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.client import (
    BeamSearch,
    ChatMessage,
    ChatPrompt,
    SamplingOptions,
    SamplingParams,
    StructuredOutput,
    TlsFiles,
    Tool,
    ToolCall,
    results,
)
from baton.client.calls import Attempts, Settings, checked_metadata
from baton.client.requests import (
    detokenize_request,
    generate_request,
    prompt_message,
    sampling_message,
    tokenize_request,
)
from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, Overloaded, WorkerLost
from baton.v1 import inference_pb2, sampling_pb2

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def plain_request(**changes: Any) -> inference_pb2.GenerateRequest:
    arguments: dict[str, Any] = {"model": "", "priority": 0, "cache_salt": ""}
    arguments |= {"add_special_tokens": True} | changes
    return generate_request("text", SamplingParams(), **arguments)


def test_a_class_is_named() -> None:
    assert plain_request(slo_class="batch").slo_class == "batch"
    assert not plain_request().slo_class


def test_a_receipt_is_asked_for() -> None:
    assert plain_request(return_receipt=True).return_receipt
    assert not plain_request().return_receipt


@given(TEXT)
def test_text_is_sent_as_text(text: str) -> None:
    assert prompt_message(text) == inference_pb2.Prompt(text=text)


def test_a_conversation_is_sent_with_its_tools() -> None:
    arguments = {"city": "Oslo"}
    call = ToolCall("weather", arguments, id="call_1")
    prompt = ChatPrompt(
        [
            ChatMessage("assistant", "", tool_calls=[call], reasoning_content="so"),
            {"role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "weather"},
        ],
        tools=[Tool("weather", "of a city", {"type": "object"}), Tool("clock")],
        template_kwargs={"enable_thinking": False},
        continue_final_message=True,
        add_generation_prompt=False,
    )
    chat = prompt_message(prompt).chat
    asked, answered = chat.messages
    (sent,) = asked.tool_calls
    assert (sent.id, sent.name, json.loads(sent.arguments)) == ("call_1", "weather", arguments)
    assert (asked.role, asked.reasoning_content) == ("assistant", "so")
    assert (answered.tool_call_id, answered.name) == ("call_1", "weather")
    assert [tool.name for tool in chat.tools] == ["weather", "clock"]
    assert json.loads(chat.tools[0].parameters) == {"type": "object"}
    assert not chat.tools[1].parameters
    assert json.loads(chat.template_kwargs) == {"enable_thinking": False}
    assert chat.continue_final_message
    assert chat.HasField("add_generation_prompt")


def test_what_a_conversation_does_not_say_is_not_sent() -> None:
    messages = [ChatMessage("user", "hi")]
    assert prompt_message(ChatPrompt(messages)) == prompt_message(messages)
    assert not prompt_message(messages).chat.HasField("add_generation_prompt")


@pytest.mark.parametrize(
    ("address", "addresses", "is_tls"),
    [
        ("http://a:1", ("a:1",), False),
        ("https://a:1/, HTTPS://[::1]:2", ("a:1", "[::1]:2"), True),
        ("a:1", ("a:1",), False),
    ],
)
def test_an_address_may_be_a_url(address: str, addresses: tuple[str, ...], is_tls: bool) -> None:
    settings = Settings.of(address, 1, (), 0)
    assert settings.addresses == addresses
    assert (settings.tls is not None) == is_tls


@pytest.mark.parametrize("adds", [True, False])
def test_special_tokens_are_added_to_text_or_not(adds: bool) -> None:
    asked = (
        plain_request(add_special_tokens=adds),
        tokenize_request("text", model="", add_special_tokens=adds),
    )
    assert [request.prompt.omit_special_tokens for request in asked] == [not adds, not adds]


@given(IDS, st.sampled_from([list, tuple]))
def test_integers_are_sent_as_token_ids(ids: list[int], kind: type[Any]) -> None:
    assert list(prompt_message(kind(ids)).token_ids.ids) == ids


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_messages_are_sent_as_a_conversation(messages: list[tuple[str, str]]) -> None:
    as_objects = prompt_message([ChatMessage(*m) for m in messages])
    as_mappings = prompt_message([{"role": role, "content": content} for role, content in messages])
    assert as_objects == as_mappings
    assert [(m.role, m.content) for m in as_objects.chat.messages] == messages


def test_an_unset_parameter_is_not_sent() -> None:
    assert sampling_message(SamplingParams()) == sampling_pb2.SamplingParams()


def test_every_parameter_is_sent_and_has_its_option() -> None:
    names = [field.name for field in fields(SamplingParams)]
    assert names == [field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields]
    assert get_type_hints(SamplingOptions) == get_type_hints(SamplingParams)
    values: Mapping[str, Any] = {
        "logit_bias": {3: 0.5},
        "stop": ["a"],
        "stop_token_ids": [4],
        "allowed_token_ids": [4],
        "logprob_token_ids": [4],
        "bad_words": ["a"],
        "beam_search": BeamSearch(2),
        "structured_output": StructuredOutput(json_object=True),
    }
    for name in names:
        sent = sampling_message(SamplingParams(**{name: values.get(name, 1)}))
        assert [field.name for field, _ in sent.ListFields()] == [name]


def test_one_stop_string_is_not_taken_apart() -> None:
    assert list(sampling_message(SamplingParams(stop="end")).stop) == ["end"]
    assert list(sampling_message(SamplingParams(bad_words="end")).bad_words) == ["end"]


@pytest.mark.parametrize(("early", "number"), [(False, 0), (True, 1), ("never", 2)])
def test_a_beam_search_is_sent(early: bool | Literal["never"], number: int) -> None:
    sent = sampling_message(SamplingParams(beam_search=BeamSearch(4, -0.5, early))).beam_search
    assert (sent.width, sent.length_penalty, sent.early_stopping) == (4, -0.5, number)


def test_wrong_beams_are_named() -> None:
    wrong: tuple[tuple[BeamSearch, str], ...] = (
        (BeamSearch(-1), "width"),
        (BeamSearch(2, "x"), "length_penalty"),  # type: ignore[arg-type]
        (BeamSearch(2, early_stopping="always"), "early_stopping"),  # type: ignore[arg-type]
    )
    for beam, field in wrong:
        with pytest.raises(InvalidRequest, match=rf"sampling\.beam_search\.{field}: "):
            sampling_message(SamplingParams(beam_search=beam))


def test_results_have_the_fields_of_the_contract() -> None:
    for kind, message in (
        (results.Usage, inference_pb2.Usage),
        (results.TimeToFirstToken, inference_pb2.TimeToFirstToken),
        (results.Timing, inference_pb2.RequestTiming),
        (results.WorkerStatus, inference_pb2.WorkerStatus),
        (results.Model, inference_pb2.Model),
    ):
        assert [f.name for f in fields(kind)] == [f.name for f in message.DESCRIPTOR.fields]


SURROGATES: Mapping[str, Callable[[str], Any]] = {
    "prompt.text": prompt_message,
    "prompt.chat.messages[1].role": lambda s: prompt_message(
        [ChatMessage("a", "b"), ChatMessage(s, "b")]
    ),
    "prompt.chat.messages[0].content": lambda s: prompt_message([{"role": "a", "content": s}]),
    "sampling.stop[1]": lambda s: sampling_message(SamplingParams(stop=["x", s])),
    "sampling.stop[0]": lambda s: sampling_message(SamplingParams(stop=s)),
    "model": lambda s: tokenize_request("text", model=s, add_special_tokens=True),
    "cache_salt": lambda s: plain_request(cache_salt=s),
    "slo_class": lambda s: plain_request(slo_class=s),
}


@pytest.mark.parametrize("field", SURROGATES)
@given(before=TEXT, surrogate=st.characters(categories=["Cs"]), after=TEXT)
def test_a_lone_surrogate_is_refused_with_field_position_and_fix(
    field: str, before: str, surrogate: str, after: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SURROGATES[field](before + surrogate + after)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert f"U+{ord(surrogate):04X} at position {len(before)};" in violation.description
    assert "replace" in violation.description
    str(caught.value).encode()


REFUSED: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("prompt", lambda: prompt_message(b"bytes")),  # type: ignore[arg-type]
    ("prompt", lambda: prompt_message(3)),  # type: ignore[arg-type]
    ("prompt", lambda: prompt_message({"role": "a", "content": "b"})),  # type: ignore[arg-type]
    ("prompt.token_ids.ids[1]", lambda: prompt_message([0, -1])),
    ("prompt.token_ids.ids[0]", lambda: prompt_message([2**32])),
    ("prompt.token_ids.ids[0]", lambda: prompt_message([0.5])),  # type: ignore[list-item]
    ("prompt.token_ids.ids[0]", lambda: prompt_message(["a"])),  # type: ignore[list-item]
    ("prompt.chat.messages[0]", lambda: prompt_message([{"role": "a"}])),
    ("prompt.chat.messages[0]", lambda: prompt_message([{"role": "a", "content": "b", "x": 1}])),
    (
        "prompt.chat.messages[0].tool_calls[0]",
        lambda: prompt_message([{"role": "a", "content": "b", "tool_calls": ["x"]}]),
    ),
    (
        "prompt.chat.tools[0].parameters",
        lambda: prompt_message(ChatPrompt([], tools=[Tool("x", parameters={"a": object()})])),
    ),
    ("prompt.chat.tools[0]", lambda: prompt_message(ChatPrompt([], tools=["x"]))),  # type: ignore[list-item]
    (
        "prompt.chat.template_kwargs",
        lambda: prompt_message(ChatPrompt([], template_kwargs={"a": object()})),
    ),
    ("prompt.chat.messages[1]", lambda: prompt_message([ChatMessage("a", "b"), 3])),  # type: ignore[list-item]
    ("prompt.chat.messages[0].content", lambda: prompt_message([ChatMessage("a", 3)])),  # type: ignore[arg-type]
    ("token_ids[0]", lambda: detokenize_request([-1], model="", skip_special_tokens=False)),
    ("sampling.n", lambda: sampling_message(SamplingParams(n=-1))),
    ("sampling.top_k", lambda: sampling_message(SamplingParams(top_k=-1))),
    ("sampling.seed", lambda: sampling_message(SamplingParams(seed=2**64))),
    ("sampling.max_tokens", lambda: sampling_message(SamplingParams(max_tokens=1.5))),  # type: ignore[arg-type]
    ("sampling.temperature", lambda: sampling_message(SamplingParams(temperature="hot"))),  # type: ignore[arg-type]
    ("sampling.stop[0]", lambda: sampling_message(SamplingParams(stop=[3]))),  # type: ignore[list-item]
    ("sampling.stop_token_ids[0]", lambda: sampling_message(SamplingParams(stop_token_ids=[-3]))),
    ("sampling.logit_bias[-1]", lambda: sampling_message(SamplingParams(logit_bias={-1: 1.0}))),
    ("priority", lambda: plain_request(priority=2**31)),
    ("timeout_s", lambda: Settings.of("a:1", 0, (), 0)),
    ("timeout_s", lambda: Settings.of("a:1", float("inf"), (), 0)),
    ("timeout_s", lambda: Settings.of("a:1", float("nan"), (), 0)),
    ("address", lambda: Settings.of("localhost", 1, (), 0)),
    ("address", lambda: Settings.of("http://localhost", 1, (), 0)),
    ("address", lambda: Settings.of("http://localhost:1/v1", 1, (), 0)),
    ("address", lambda: Settings.of("ftp://localhost:1", 1, (), 0)),
    ("address", lambda: Settings.of("http://a:1,https://b:1", 1, (), 0)),
    ("address", lambda: Settings.of("http://a:1", 1, (), 0, tls=TlsFiles())),
    ("address", lambda: Settings.of("::1:50051", 1, (), 0)),
    ("max_retries", lambda: Settings.of("a:1", 1, (), -1)),
    ("metadata['Key']", lambda: checked_metadata({"Key": "a"})),
    ("metadata['grpc-x']", lambda: checked_metadata({"grpc-x": "a"})),
    ("metadata['a-bin']", lambda: checked_metadata({"a-bin": "a"})),
    ("metadata['key']", lambda: checked_metadata([("key", "\ud800")])),
    ("metadata['key']", lambda: checked_metadata([("key", "new\nline")])),
    ("metadata", lambda: checked_metadata({"key": "v" * 9000})),
    ("metadata", lambda: checked_metadata([("key", "v")] * 300)),
)


@pytest.mark.parametrize(
    ("field", "act"), REFUSED, ids=[f"{i}-{field}" for i, (field, _) in enumerate(REFUSED)]
)
def test_what_cannot_be_sent_is_refused(field: str, act: Callable[[], Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        act()
    assert [violation.field for violation in caught.value.violations] == [field]


def test_not_a_number_is_sent_for_the_server_to_refuse() -> None:
    sent = sampling_message(SamplingParams(temperature=float("nan"), top_p=float("inf")))
    assert sent.temperature != sent.temperature
    assert sent.top_p == float("inf")


@pytest.mark.parametrize("address", ["localhost:1", "1.2.3.4:50051", "[::1]:5", "unix:/tmp/a"])
def test_addresses_that_can_be_called(address: str) -> None:
    assert Settings.of(address, 1, (), 0).address == address


@given(
    st.integers(0, 3),
    st.lists(st.floats(0, 4), max_size=6),
    st.floats(0, 10),
)
def test_retries_are_counted_and_end_before_the_deadline(
    max_retries: int, delays_s: list[float], timeout_s: float
) -> None:
    attempts, now_s, num_retries = Attempts(max_retries, timeout_s), 0.0, 0
    for asked_s in delays_s:
        expected_s = asked_s * 2**num_retries
        delay_s = attempts.delay_s(Overloaded("full", retry_after_s=asked_s), now_s)
        if delay_s is None:
            assert num_retries == max_retries or now_s + expected_s >= timeout_s
            continue
        assert delay_s == expected_s
        num_retries += 1
        now_s += delay_s
        assert attempts.remaining_s(now_s) > 0
    assert num_retries <= max_retries


@pytest.mark.parametrize(
    ("left_s", "kind"), [(-1.0, DeadlineExceeded), (0.001, DeadlineExceeded), (60.0, WorkerLost)]
)
def test_a_call_that_was_cancelled_at_its_deadline_was_too_late(
    left_s: float, kind: type[BatonError]
) -> None:
    cancelled = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, details="")
    attempts = Attempts(0, time.monotonic() + left_s)
    settings = Settings.of("h:1", 60.0, (), 0)
    assert type(settings.error_of(cancelled, "r-1", attempts)) is kind


@pytest.mark.parametrize("error", [InvalidRequest("x"), BatonError("x")])
def test_only_what_may_succeed_later_is_retried(error: BatonError) -> None:
    assert Attempts(3, 100.0).delay_s(error, 0.0) is None
    assert Attempts(3, 100.0).delay_s(WorkerLost("x", retry_after_s=0.5), 0.0) == 0.5


@pytest.mark.parametrize(("max_retries", "waits_s"), [(0, 0.0), (2, 31.0), (6, 63.0)])
def test_a_stream_that_has_begun_waits_for_a_gateway_to_start_again(
    max_retries: int, waits_s: float
) -> None:
    attempts, lost, now_s = Attempts(max_retries, 100.0), WorkerLost("x", retry_after_s=1.0), 0.0
    while (delay_s := attempts.delay_s(lost, now_s, is_resumption=True)) is not None:
        now_s += delay_s
    assert now_s == waits_s
