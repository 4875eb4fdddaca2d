"""What a receipt is compared by, and where it is read from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict

from baton.check.receipts import Receipt, compare, read_receipts
from baton.errors import ConfigError
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
    assert (verdict.num_tokens, verdict.num_logprobs) == (4, 3)


def test_what_has_changed_is_named() -> None:
    verdict = compare(RIGHT, receipt([1, 2, 3], [], digest="b", kv_dtype="int8"))
    assert verdict.changes == ("digest of the weights: b, was ", "type of KV: int8, was ")


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
