"""The open loop over HTTP: each piece has its tokens, and what is no whole answer is a failure."""

from __future__ import annotations

import json

import pytest

from bench.drive_http import drive_http
from bench.workload import LoadRequest
from tests.support.canned_http import answering

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
PIECES = b"".join(
    b"data: " + json.dumps({"choices": [{"text": "", "token_ids": ids}]}).encode() + b"\n\n"
    for ids in ([7], [], [8, 9])
)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("answer", "error", "num_tokens"),
    [
        (HEAD + PIECES + DONE, "", 3),
        (HEAD + PIECES, "BROKEN", 3),
        (HEAD + b'data: {"error": {"message": "no"}}\n\n' + DONE, "BROKEN", 0),
        (b'HTTP/1.1 429 Too Many Requests\r\n\r\n{"error": {}}', "BROKEN", 0),
        (b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\n\r\n{}", "OVERLOADED", 0),
        (b"HTTP/1.1 408 Request Timeout\r\n\r\n{}", "DEADLINE_EXCEEDED", 0),
        (HEAD + b'data: {"error": {"type": "timeout_error"}}\n\n', "DEADLINE_EXCEEDED", 0),
        (b"", "BROKEN", 0),
    ],
)
async def test_a_record_has_the_pieces_and_whether_the_answer_was_whole(
    answer: bytes, error: str, num_tokens: int
) -> None:
    requests = (LoadRequest(0.0, (1, 2, 3), 4), LoadRequest(0.001, (5,), 2))
    async with answering(lambda _: answer) as asked:
        records = await drive_http(asked.address, requests, "salt", deadline_s=5)
    assert all(b"\r\nx-envoy-expected-rq-timeout-ms: 5000\r\n" in head for head in asked.heads)
    assert [record.num_prompt_tokens for record in records] == [3, 1]
    for record in records:
        assert (record.error, record.num_output_tokens) == (error, num_tokens)
        assert record.is_complete is (not error)
    assert {(len(body["prompt"]), body["max_tokens"]) for body in asked.bodies} == {(3, 4), (1, 2)}
    assert {body["cache_salt"] for body in asked.bodies} == {"salt"}
