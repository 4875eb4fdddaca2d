"""An answer with a receipt comes out the same again, token for token and log probability for log
probability: from the other tier's KV, from the cache, taken up after a break, by other degrees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from baton.check.receipts import Receipt, compare, read_receipts, replay
from baton.cli.check_receipt import check_receipt
from baton.rpc.channel import aio_channel
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from baton_kernels.cpu.library import library
from tests.support.live_tiers import ONLY_DECODES, LiveSystem, live_system
from tests.support.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library() is None, reason="torch's own operations round by the batch"),
]

PROMPT = [i * 7 % 250 for i in range(83)]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 0.9, "top_p": 0.95, "seed": 5, "n": 2}
HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_tiny_model(path, num_attention_heads=8, num_key_value_heads=4)


@asynccontextmanager
async def split(model: Path) -> AsyncIterator[LiveSystem]:
    worker = {"engine": "torch", "model": str(model), "served_model_name": "tiny"}
    worker |= {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 96}
    gateway = {"model": str(model), "served_model_name": "tiny"}
    async with live_system(
        worker_options={**worker, "num_threads": 1, "block_size": 8},
        decode_options=ONLY_DECODES,
        gateway_options=gateway,
    ) as system:
        yield system


def asked(sampling: dict[str, Any]) -> Receipt:
    return Receipt(prompt_token_ids=PROMPT, sampling=sampling_pb2.SamplingParams(**sampling))


async def post(system: LiveSystem, body: dict[str, Any]) -> Any:
    content = json.dumps({"prompt": PROMPT, "return_receipt": True, **body}).encode()
    request = Request(f"http://{system.http}/v1/completions", content, HEADERS)

    def read() -> Any:
        with urlopen(request, timeout=120) as response:
            return response.read()

    return await asyncio.to_thread(read)


async def taken_up(address: str, receipt: Receipt, num_tokens: int) -> Receipt:
    """The receipt of an answer that goes on behind so many tokens of each choice."""
    request = inference_pb2.GenerateRequest(sampling=receipt.sampling, return_receipt=True)
    request.prompt.token_ids.ids.extend(receipt.prompt_token_ids)
    for index, choice in enumerate(receipt.choices):
        request.resume_from.add(choice=index, token_ids=choice.token_ids[:num_tokens])
    async with aio_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        pieces = [piece async for piece in stub.Generate(request)]
    return next(piece.receipt for piece in pieces if piece.HasField("receipt"))


async def test_every_way_gives_the_same_log_probabilities(model: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.json"
    async with split(model) as system:
        receipts = []
        for sampling in (GREEDY, SAMPLED):
            first = await replay(asked(sampling), system.gateway)
            assert first.handoffs[0].checksum
            assert first.handoffs[0].num_bytes
            assert [each.tier for each in first.workers] == ["prefill", "decode"]
            num_choices = sampling.get("n", 1)
            again = await replay(first, system.gateway)
            rest = await taken_up(system.gateway, first, 5)
            for other, num_logprobs in ((again, 12), (rest, 12 - 5)):
                verdict = compare(first, other)
                assert (verdict.first_difference, verdict.changes) == ("", ())
                assert verdict.num_tokens == 12 * num_choices
                assert verdict.num_logprobs == num_logprobs * num_choices
            receipts.append(first)
        # A drawn seed is in the receipt, and numbers of 64 bits survive JSON.
        drawn = await post(system, {**GREEDY, "temperature": 1.0, "logprobs": 1})
        answers.write_bytes(drawn)
        streamed = (await post(system, {**SAMPLED, "stream": True})).decode()
    (receipt,) = read_receipts(answers)
    assert receipt.model == "tiny"
    assert receipt.sampling.seed
    assert receipt.digest
    logprobs = json.loads(drawn)["choices"][0]["logprobs"]["token_logprobs"]
    assert [*receipt.choices[0].logprobs] == pytest.approx(logprobs, abs=1e-6)
    last = next(line for line in streamed.splitlines() if '"receipt"' in line)
    answers_of_stream = tmp_path / "stream.json"
    answers_of_stream.write_text(last.removeprefix("data: "))
    assert compare(receipts[1], read_receipts(answers_of_stream)[0]).is_equal


@pytest.mark.long
def test_after_a_restart_on_another_layout(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer() -> bytes:
        async with split(model) as system:
            return bytes(await post(system, {**SAMPLED, "logprobs": 1}))

    path = tmp_path / "answer.json"
    path.write_bytes(asyncio.run(answer()))
    options = {"model": str(model), "log_level": "error", "num_gpu_blocks_override": 96}
    degrees = {"tensor_parallel_size": 2}
    assert check_receipt(path, options, None, None, None, degrees) == 0
    assert "the same answer: 24 tokens and 24 log probabilities" in capsys.readouterr().out
    other = make_tiny_model(
        tmp_path / "other", seed=1, num_attention_heads=8, num_key_value_heads=4
    )
    assert check_receipt(path, {**options, "model": str(other)}, None, None, None, {}) == 1
    printed = capsys.readouterr().out
    assert "ANOTHER answer" in printed
    assert "digest of the weights" in printed
