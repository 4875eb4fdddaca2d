"""What a receipt is compared by, and where it is read from."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.json_format import MessageToDict

from baton.check.receipts import Receipt, compare, read_receipts, replay
from baton.errors import ConfigError
from baton.rpc.server import start_server
from baton.v1 import inference_pb2, inference_pb2_grpc
from baton.v1.inference_pb2 import ReceiptChoice


def receipt(tokens: list[int], logprobs: list[float], **more: str) -> Receipt:
    choices = [ReceiptChoice(token_ids=[7]), ReceiptChoice(token_ids=tokens, logprobs=logprobs)]
    return Receipt(prompt_token_ids=[1], choices=choices, **more)


RIGHT = receipt([1, 2, 3], [-0.5, -0.25, -1.0])


@pytest.mark.parametrize(
    ("tokens", "logprobs", "difference"),
    [
        ([1, 2, 3], [-0.5, -0.25, -1.0], ""),
        ([1, 2, 3], [-0.25, -1.0], ""),  # taken up after its first token
        ([1, 2, 3], [], ""),
        ([1, 4, 3], [-0.5, -0.25, -1.0], "choice 1, token 1: 4 instead of 2"),
        ([1, 2], [-0.5, -0.25], "choice 1, token 2: the end instead of 3"),
        (
            [1, 2, 3],
            [-0.5, -0.25, -1.0000001192092896],
            "choice 1, token 2: the log probability is -1.0000001192092896 instead of -1.0",
        ),
    ],
)
def test_tokens_and_log_probabilities_are_compared_to_the_bit(
    tokens: list[int], logprobs: list[float], difference: str
) -> None:
    verdict = compare(RIGHT, receipt(tokens, logprobs))
    assert (verdict.first_difference, verdict.is_equal) == (difference, not difference)
    assert (verdict.num_tokens, verdict.num_logprobs) == (4, len(logprobs))


def test_what_has_changed_is_named() -> None:
    verdict = compare(RIGHT, receipt([1, 2, 3], [], digest="b", kv_dtype="int8"))
    assert verdict.changes == ("digest of the weights: b, was ", "type of KV: int8, was ")


class Gateway(inference_pb2_grpc.InferenceServiceServicer):
    """Gives each request a receipt that names the model that was asked."""

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        keys = [value for name, value in context.invocation_metadata() if name == "authorization"]
        yield inference_pb2.GenerateResponse()
        given = Receipt(model=request.model, digest=",".join(keys))
        yield inference_pb2.GenerateResponse(receipt=given)


async def test_the_model_of_the_receipt_is_asked() -> None:
    """A gateway of several models gives requests without a name to the first."""

    def register(server: grpc.aio.Server) -> tuple[str, ...]:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(Gateway(), server)
        return ("baton.v1.InferenceService",)

    server = await start_server("127.0.0.1:0", register)
    try:
        own = Receipt(model="second")
        assert (await replay(own, server.address, "k")) == Receipt(
            model="second", digest="Bearer k"
        )
        of_adapter = Receipt(model="second", adapter="adapter")
        assert (await replay(of_adapter, server.address)).model == "adapter"
        assert (await replay(own, server.address, model="renamed")).model == "renamed"
    finally:
        await server.stop()


def test_receipts_are_read_from_answers(tmp_path: Path) -> None:
    path, document = (
        tmp_path / "answer.json",
        MessageToDict(RIGHT, preserving_proto_field_name=True),
    )
    for content, number in (
        (document, 1),
        ({"choices": [], "receipt": document}, 1),
        ({"receipt": [document, document]}, 2),
    ):
        path.write_text(json.dumps(content))
        assert read_receipts(path) == (RIGHT,) * number


@pytest.mark.parametrize("content", ["{}", "no json", '{"receipt": {"unknown": 1}}', "[]"])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="return_receipt"):
        read_receipts(path)
