"""Messages of more fields than a server takes are refused before they are parsed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.rpc.channel import aio_channel
from baton.rpc.message_fields import has_more_fields
from baton.rpc.server import start_server
from baton.rpc.status import from_rpc_error
from baton.v1 import inference_pb2, inference_pb2_grpc
from gateway.server import MAX_MESSAGE_FIELDS
from tests.support.fake_inference import SERVICE, FakeInference

Request = inference_pb2.GenerateRequest


def num_fields(message: Message) -> int:
    """As they are written: all that is packed is one."""
    number = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            number += 3 * len(value)
        elif field.is_repeated and field.is_packed:
            number += 1
        else:
            values: Iterable[Any] = value if field.is_repeated else [value]
            number += sum(1 + (num_fields(v) if isinstance(v, Message) else 0) for v in values)
    return number


@given(
    texts=st.lists(st.text(max_size=200), max_size=9),
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=200),
    biases=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(width=32), max_size=9),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
def test_all_fields_are_counted(
    texts: list[str], ids: list[int], biases: dict[int, float], seed: int | None
) -> None:
    request = Request(priority=-1)
    for text in texts:
        request.prompt.chat.messages.add(role="user", content=text).tool_calls.add(name=text)
        request.resume_from.add(token_ids=ids, has_ended=True)
    request.sampling.stop_token_ids.extend(ids)
    request.sampling.bad_words.extend(texts)
    request.sampling.logit_bias.update(biases)
    if seed is not None:
        request.sampling.seed = seed
    raw, number = request.SerializeToString(), num_fields(request)
    assert not has_more_fields(raw, Request.DESCRIPTOR, number)
    assert has_more_fields(raw, Request.DESCRIPTOR, number - 1)


@given(data=st.binary(max_size=300), most=st.integers(0, 300))
def test_any_bytes_have_some_number_of_fields(data: bytes, most: int) -> None:
    has_more = has_more_fields(data, Request.DESCRIPTOR, most)
    assert not has_more or has_more_fields(data, Request.DESCRIPTOR, most - 1)
    assert not has_more or most < len(data)


def many(kind: str) -> Request:
    """As many of something as a message holds, or a million, each of a few bytes."""
    request = Request()
    match kind:
        case "messages":
            for _ in range(1_000_000):
                request.prompt.chat.messages.add()
        case "biases":
            request.sampling.logit_bias.update(dict.fromkeys(range(700_000), 1.0))
        case _:
            request.sampling.bad_words.extend(["a"] * 1_000_000)
    return request


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["messages", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("biases", "words"))],
)
async def test_very_many_fields_are_refused_unread(kind: str) -> None:
    def register(server: Any) -> tuple[str, ...]:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(FakeInference(), server)
        return (SERVICE,)

    server = await start_server("127.0.0.1:0", register, max_fields=MAX_MESSAGE_FIELDS)
    try:
        async with aio_channel(server.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(Exception) as caught:  # noqa: PT011, what it is follows
                async for _ in stub.Generate(many(kind)):
                    pass
            refusal = from_rpc_error(caught.value)  # type: ignore[arg-type]
            assert isinstance(refusal, InvalidRequest)
            assert f"more than {MAX_MESSAGE_FIELDS} fields" in refusal.message
            few = Request(prompt=inference_pb2.Prompt(text="x" * 100_000))
            few.resume_from.add(token_ids=[1] * 1_000_000)
            async for _ in stub.Generate(few):
                pass
    finally:
        await server.stop()
