"""While a text of a megabyte is tokenized, all others are served: ordered by events, at any speed.

The process that tokenizes long texts is frozen meanwhile, so that whoever would wait for it, or
tokenize in the gateway's own process, is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers

from baton.config import GatewayOptions
from baton.errors import InvalidRequest
from baton.rpc.channel import aio_channel
from baton.rpc.status import from_rpc_error
from baton.service import ReadyReport
from baton.types import Tier
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from gateway.intake.child import ChildProcess
from gateway.long_work import let_others_run
from gateway.server import serve_gateway
from gateway.serving import Serving
from tests.support.fake_workers import make_info
from tests.support.grpc_workers import GrpcWorker, serving
from tests.support.http_connection import Connection
from tests.support.live_tiers import reporting
from tests.support.virtual_loop import run_virtual

pytestmark = pytest.mark.slow

MEGABYTE = 1_000_000
MAX_MODEL_LEN = MEGABYTE + 2
PIECE = 65_536
MODULES = (
    "gateway.http.format",
    "gateway.http.json_body",
    "gateway.intake.validator",
    "gateway.links.grpc_link",
    "gateway.long_work",
    "gateway.serving",
    "gateway.intake.tokenizer",
)
LARGE = {"max_model_len": MAX_MODEL_LEN, "num_blocks": MAX_MODEL_LEN}


class Asked:
    """Questions that the gateway's helper processes were asked: how long each one's text is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.process: ChildProcess | None = None
        self._lengths: asyncio.Queue[int] = asyncio.Queue()
        ask = ChildProcess.ask

        async def watched(process: ChildProcess, question: Mapping[str, Any]) -> dict[str, Any]:
            self.process = process
            self._lengths.put_nowait(len(question["text"]))
            return await ask(process, question)

        monkeypatch.setattr(ChildProcess, "ask", watched)

    async def next_length(self) -> int:
        """Length of the next question's text, in characters."""
        return await self._lengths.get()

    @property
    def is_empty(self) -> bool:
        """Whether none was asked since."""
        return self._lengths.empty()

    @contextlib.contextmanager
    def frozen(self) -> Any:
        """The process that was asked last answers nothing within."""
        assert self.process is not None
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
async def report(tmp_path: Path) -> AsyncIterator[ReadyReport]:
    """Ready report of a gateway, with one worker of each tier, for a model that takes a megabyte of
    prompt, a byte a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (not c.isascii(), c))
    tokenizer = HfTokenizer(models.BPE({c: i for i, c in enumerate(alphabet[:97])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": MAX_MODEL_LEN}))
    async with (
        serving(GrpcWorker(make_info("d", Tier.DECODE, **LARGE))) as decode,
        serving(GrpcWorker(make_info("p", Tier.PREFILL, **LARGE))) as prefill,
        reporting(
            serve_gateway,
            GatewayOptions(
                model=str(tmp_path),
                port=0,
                http_port=0,
                prefill_workers=(prefill.address,),
                decode_workers=(decode.address,),
            ),
        ) as report,
    ):
        yield report


@pytest.fixture
async def stub(report: ReadyReport) -> AsyncIterator[Any]:
    async with aio_channel(report.address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def tokenize_request(num_chars: int) -> inference_pb2.TokenizeRequest:
    return inference_pb2.TokenizeRequest(prompt=inference_pb2.Prompt(text="x" * num_chars))


async def short_stream(stub: Any) -> int:
    """Tokens of a stream from a text that is not long, to its end."""
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(text="hello"),
        sampling=sampling_pb2.SamplingParams(max_tokens=8, temperature=0.0),
    )
    return sum([len(chunk.token_ids) async for chunk in stub.Generate(request)])


async def test_streams_go_on_while_a_megabyte_is_tokenized(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    await stub.Tokenize(tokenize_request(10_000))  # starts the process
    assert not asked.is_empty
    assert await asked.next_length() == 10_000
    with asked.frozen():
        long = asyncio.ensure_future(stub.Tokenize(tokenize_request(MEGABYTE)))
        length = asyncio.ensure_future(asked.next_length())
        await asyncio.wait((long, length), return_when=asyncio.FIRST_COMPLETED)
        assert length.result() == MEGABYTE
        # Both kinds of others, one after the other: each goes by the event loop many times.
        for _ in range(3):
            assert await short_stream(stub) == 8
            assert len((await stub.Tokenize(tokenize_request(1_000))).token_ids) == 1_000
        assert not long.done()
    assert len((await long).token_ids) == MEGABYTE


async def test_eight_megabytes_are_refused_and_nobody_reads_them(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(tokenize_request(8 * MEGABYTE))
    refusal = from_rpc_error(caught.value)
    assert isinstance(refusal, InvalidRequest)
    assert [violation.field for violation in refusal.violations] == ["prompt.text"]
    assert asked.is_empty
    assert await short_stream(stub) == 8


def test_others_get_many_turns_between_two_pieces_of_long_work() -> None:
    async def turns_of_others(size: int) -> int:
        num_turns = 0

        async def other() -> None:
            nonlocal num_turns
            for _ in range(100):
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await let_others_run(size)
        num_meanwhile = num_turns
        await task
        return num_meanwhile

    assert run_virtual(turns_of_others(MEGABYTE)) == 100
    assert run_virtual(turns_of_others(1_000)) == 0


async def test_a_long_text_gives_way_between_its_pieces(
    stub: Any, report: ReadyReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    async def watched(size: int) -> None:
        if size >= PIECE:  # of less, no others run
            sizes.append(size)
        await let_others_run(size)

    for module in MODULES:
        monkeypatch.setattr(f"{module}.let_others_run", watched)
    request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="x" * 100_000))
    request.sampling.max_tokens = 1
    async for _ in stub.Generate(request):
        pass
    # Its text when it was read, and before it is written for the helper; its tokens in two pieces,
    # before they are looked at, and before they are placed, in two pieces for their digests, and in
    # two as they are written to a worker.
    of_text = [100_000, 100_000]
    of_tokens = [*[100_000] * 2, PIECE, 100_000, PIECE, 100_000]
    assert sizes == [*of_text, PIECE, *of_tokens]
    sizes.clear()
    body = json.dumps({"prompt": "x" * 100_000, "max_tokens": 1}).encode()
    connection = Connection(report.http_address)
    assert (await connection.post("/v1/completions", body)).status == 200
    # Its body, too, before and after it is parsed.
    assert sizes == [len(body), len(body), *of_text, PIECE, *of_tokens]
    sizes.clear()
    request.prompt.token_ids.ids.extend([1] * 100_000)
    async for _ in stub.Generate(request):
        pass
    # Token ids in two pieces, before and after they are looked at.
    of_ids = [PIECE, 100_000, 100_000, *of_tokens]
    assert sizes == of_ids
    sizes.clear()
    body = json.dumps({"prompt": [1] * 100_000, "max_tokens": 1}).encode()
    assert (await connection.post("/v1/completions", body)).status == 200
    connection.close()
    # The body is looked through, its rest parsed, and its ids read by themselves.
    at_door, of_rest = sizes[: -len(of_ids)], sizes[-len(of_ids) :]
    assert of_rest == of_ids
    assert at_door == [len(body), 2**18, len(body)]


async def test_of_many_prompts_a_few_begin_at_a_time(
    report: ReadyReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, generate = 0, Serving.generate

    async def counted(serving: Serving, *arguments: Any) -> None:
        nonlocal begun
        begun += 1
        await generate(serving, *arguments)

    steps: list[int] = []

    async def watched(size: int) -> None:
        if size >= PIECE:
            steps.append(begun)
        await let_others_run(size)
        steps.append(begun)

    monkeypatch.setattr(Serving, "generate", counted)
    monkeypatch.setattr("gateway.long_work.let_others_run", watched)
    body = json.dumps({"prompt": [[1] * 8000] * 32, "max_tokens": 1}).encode()
    connection = Connection(report.http_address)
    assert (await connection.post("/v1/completions", body)).status == 200
    connection.close()
    ends = [*steps, begun]
    assert begun == 32
    assert max(b - a for a, b in itertools.pairwise(ends)) <= 9
