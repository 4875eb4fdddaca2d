"""Prompts of 10 MB of text through every door, and bodies beyond the limit of each.

Words are long, so that tokenizing and computing them take moments.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from baton.client import SamplingParams
from baton.errors import BatonError
from baton.rpc.channel import MAX_MESSAGE_BYTES
from gateway.http.connection import HttpLimits
from tests.support.http_connection import Connection
from tests.support.live_tiers import LiveSystem, live_system
from tests.support.oracle_model import VOCAB_SIZE, make_oracle_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

NUM_BYTES, WORD_BYTES = 10_000_000, 1000
NUM_WORDS = NUM_BYTES // WORD_BYTES


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveSystem]:
    folder = make_oracle_model(tmp_path_factory.mktemp("model"))
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    words = [word_of(number) for number in range(VOCAB_SIZE - len(special))]
    vocab = {text: number for number, text in enumerate([*words, *special])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    workers = {"max_model_len": 1 << 15, "block_size": 256, "num_gpu_blocks_override": 200}
    options = {"model": str(folder)}
    async with live_system(worker_options=workers, gateway_options=options) as running:
        yield running
        await running.until_quiet()


def word_of(number: int) -> str:
    return f"{number:x<{WORD_BYTES - 1}}"


def text_of(num_words: int) -> str:
    return "".join(f"{word_of(number % 900)} " for number in range(num_words))


async def post(system: LiveSystem, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    connection = Connection(system.http)
    try:
        answer = await connection.post(path, json.dumps({"model": "oracle", **body}).encode())
    finally:
        connection.close()
    return answer.status, answer.body


async def generate(system: LiveSystem, text: str) -> int:
    """Number of prompt tokens, by gRPC."""
    done = await system.client.generate(text, SamplingParams(max_tokens=2))
    return done.usage.prompt_tokens


async def test_grpc_answers_it(system: LiveSystem) -> None:
    assert await generate(system, text_of(NUM_WORDS)) == NUM_WORDS


async def test_http_completions_answer_it(system: LiveSystem) -> None:
    body = {"prompt": text_of(NUM_WORDS), "max_tokens": 2}
    status, found = await post(system, "/v1/completions", body)
    assert (status, found["usage"]["prompt_tokens"]) == (200, NUM_WORDS)


@pytest.mark.parametrize(
    ("path", "field"), [("chat/completions", "prompt_tokens"), ("messages", "input_tokens")]
)
async def test_conversations_answer_it(system: LiveSystem, path: str, field: str) -> None:
    messages = [{"role": "user", "content": text_of(NUM_WORDS)}]
    status, found = await post(system, f"/v1/{path}", {"messages": messages, "max_tokens": 2})
    assert status == 200, found
    cached = found["usage"].get("cache_read_input_tokens") or 0
    assert found["usage"][field] + cached >= NUM_WORDS


async def test_what_exceeds_a_doors_limit_is_refused(system: LiveSystem) -> None:
    with pytest.raises(BatonError):
        await generate(system, text_of(MAX_MESSAGE_BYTES // WORD_BYTES + 1))
    body = {"prompt": text_of(HttpLimits().max_body_bytes // WORD_BYTES + 1)}
    status, _ = await post(system, "/v1/completions", body)
    assert status == 413
