"""Pieces of several choices, put together: each choice its own, and what belongs to the prompt
once."""

from __future__ import annotations

import json

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.client.calls import Connections, GenerateCalls, Settings
from baton.client.results import chunk_of, completion_of
from baton.errors import BatonError
from baton.rpc.channel import aio_channel
from baton.types import FinishReason, TokenLogprobs
from baton.v1 import inference_pb2, sampling_pb2

STOP = sampling_pb2.FINISH_REASON_STOP


def position(token_id: int) -> sampling_pb2.PositionLogprobs:
    chosen = sampling_pb2.TokenLogprob(token_id=token_id, logprob=-0.5)
    return sampling_pb2.PositionLogprobs(chosen=chosen)


def calls() -> GenerateCalls:
    """The calls of a stream before anything is sent."""
    connections = Connections(aio_channel, ("127.0.0.1:1",))
    request = inference_pb2.GenerateRequest()
    return GenerateCalls(connections, Settings.of("127.0.0.1:1", 1.0, (), 0), request, "r", None)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2]), max_size=12))
def test_interleaved_choices_are_taken_apart(order: list[int]) -> None:
    reader = calls()
    lengths = [0, 0, 0]
    chunks = []
    for choice in order:
        piece = inference_pb2.GenerateResponse(
            choice=choice, token_index=lengths[choice], token_ids=[choice], text=str(choice)
        )
        chunks.append(reader.accept(piece))
        lengths[choice] += 1
    for choice in (2, 0, 1):
        last = inference_pb2.GenerateResponse(
            choice=choice, token_index=lengths[choice], finish_reason=STOP, score=-choice
        )
        chunks.append(reader.accept(last))
    reader.end()
    done = completion_of("r", chunks)
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    for choice in done.choices:
        assert choice.token_ids == (choice.index,) * lengths[choice.index]
        assert choice.text == str(choice.index) * lengths[choice.index]
        assert choice.score == -choice.index
        assert choice.finish_reason is FinishReason.STOP


def test_a_stream_ends_with_all_its_choices() -> None:
    reader = calls()
    for choice in (0, 1):
        reader.accept(inference_pb2.GenerateResponse(choice=choice, token_ids=[1]))
    reader.accept(inference_pb2.GenerateResponse(choice=0, token_index=1, finish_reason=STOP))
    with pytest.raises(BatonError, match="without a last piece"):
        reader.end()


def test_what_is_reported_of_the_prompt() -> None:
    first = inference_pb2.GenerateResponse(
        token_ids=[9], text="prompt and 9", prompt_token_ids=[4, 5], prompt_logprobs=[position(5)]
    )
    other = inference_pb2.GenerateResponse(choice=1, prompt_token_ids=[4, 5], finish_reason=STOP)
    last = inference_pb2.GenerateResponse(token_index=1, finish_reason=STOP)
    done = completion_of("r", map(chunk_of, (first, other, last)))
    assert done.text == "prompt and 9"
    assert done.prompt_token_ids == (4, 5)
    assert done.prompt_logprobs == (TokenLogprobs(5, -0.5),)
    assert done.choices[0].score is None


def test_a_receipt_is_json_as_in_the_http_api() -> None:
    receipt = inference_pb2.Receipt(model="m", prompt_token_ids=[1, 2])
    receipt.sampling.seed = 2**63
    last = inference_pb2.GenerateResponse(finish_reason=STOP, receipt=receipt)
    done = completion_of("r", [chunk_of(last)])
    assert done.receipt is not None
    assert ParseDict(json.loads(json.dumps(done.receipt)), inference_pb2.Receipt()) == receipt
    assert completion_of("r", [chunk_of(inference_pb2.GenerateResponse())]).receipt is None
