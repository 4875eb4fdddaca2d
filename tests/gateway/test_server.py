"""The whole gateway process in this one, over gRPC, with small workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from baton.client.results import models_of
from baton.config import GatewayOptions
from baton.errors import (
    BatonError,
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    NoWorkers,
    Overloaded,
)
from baton.rpc.channel import aio_channel
from baton.rpc.status import from_rpc_error
from baton.service import ReadyReport
from baton.types import Tier
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from gateway import server as server_module
from gateway.server import SERVICE_NAME, serve_gateway
from gateway.service import usable_time_s
from tests.support.fake_workers import expected_output, expected_outputs, make_info
from tests.support.gateway_world import make_spec
from tests.support.grpc_workers import GrpcWorker, serving

Prompt = inference_pb2.Prompt
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad ones') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A directory with a tokenizer of 97 ids, one per byte or character, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ascii_first = sorted(alphabet, key=lambda c: (not c.isascii(), c))
    tokenizer = HfTokenizer(models.BPE({c: i for i, c in enumerate(ascii_first[:97])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 300}))
    return tmp_path


@contextlib.asynccontextmanager
async def gateway(model_path: Path, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A serving gateway; leaves nothing running."""
    ready: asyncio.Future[ReadyReport] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    filled = GatewayOptions(model=str(model_path), served_model_name="m", port=0, **options)
    running = asyncio.create_task(serve_gateway(filled, stop, ready.set_result))
    try:
        await asyncio.wait((ready, running), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        async with aio_channel(ready.result().address) as channel:
            yield channel
    finally:
        stop.set()
        await running


@contextlib.asynccontextmanager
async def cluster(
    model_path: Path, *, is_holding: bool = False
) -> AsyncIterator[tuple[grpc.aio.Channel, GrpcWorker, GrpcWorker]]:
    """A gateway with one worker of each tier, all ready."""
    decode = GrpcWorker(make_info("d", Tier.DECODE), is_holding=is_holding)
    prefill = GrpcWorker(make_info("p", Tier.PREFILL))
    async with (
        serving(decode) as d,
        serving(prefill) as p,
        gateway(model_path, prefill_workers=(p.address,), decode_workers=(d.address,)) as channel,
    ):
        yield channel, prefill, decode


def generate_request(prompt: Prompt, **sampling: Any) -> inference_pb2.GenerateRequest:
    params = sampling_pb2.SamplingParams(
        **{"max_tokens": 8, "temperature": 0.0, "seed": 0, **sampling}
    )
    return inference_pb2.GenerateRequest(prompt=prompt, sampling=params)


def ids_prompt(*ids: int) -> Prompt:
    return Prompt(token_ids=inference_pb2.TokenIds(ids=ids))


async def refusal(call: Any) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    return from_rpc_error(caught.value)


async def test_a_request_streams_from_both_tiers(model_path: Path) -> None:
    async with cluster(model_path) as (channel, _, _):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(
            generate_request(ids_prompt(1, 2, 3)), metadata=(("x-request-id", "mine.1"),)
        )
        headers = dict(await call.initial_metadata())
        chunks = [chunk async for chunk in call]
        expected = expected_output(make_spec("x", (1, 2, 3)))
        assert [t for chunk in chunks for t in chunk.token_ids] == expected
        detokenized = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=expected))
        assert "".join(chunk.text for chunk in chunks) == detokenized.text
        last = chunks[-1]
        assert last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 8)
        assert (last.usage.cached_tokens, last.usage.decode_cached_tokens) == (1, 2)
        assert (last.timing.prefill_worker, last.timing.decode_worker) == ("p", "d")
        assert (last.timing.transfer_exposed_ms, last.timing.prefill_queue_ms) == (1.5, 2.0)
        # The client's own name, made unique.
        assert headers["x-request-id"] == last.request_id
        assert last.request_id.startswith("mine.1-")


async def test_a_full_queue_refuses_before_anything_else_is_done(model_path: Path) -> None:
    decode = GrpcWorker(make_info("d", Tier.DECODE), is_holding=True)
    async with (
        serving(decode) as d,
        gateway(model_path, decode_workers=(d.address,), max_queue_size=1) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        wrong = generate_request(ids_prompt(10**6))
        # More than the worker has places for, and the queue.
        running = [stub.Generate(generate_request(ids_prompt(1, number))) for number in range(32)]
        while not isinstance(error := await refusal(stub.Generate(wrong)), Overloaded):
            assert isinstance(error, InvalidRequest)
        assert error.retry_after_s is not None
        assert error.request_id.startswith("req-")
        for call in running:
            call.cancel()
        while isinstance(await refusal(stub.Generate(wrong)), Overloaded):
            pass


def test_the_status_of_what_takes_too_long_leaves_before_the_deadline() -> None:
    assert usable_time_s(None) is None
    for remaining_s in (1e-3, 0.1, 5.0, 600.0):
        usable_s = usable_time_s(remaining_s)
        assert usable_s is not None
        assert 0.89 * remaining_s <= usable_s < remaining_s
        assert remaining_s - usable_s <= 0.02 + 1e-9


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("bad_id", ["", "two words", "x" * 129])
async def test_a_request_id_that_is_none_is_replaced(model_path: Path, bad_id: str) -> None:
    async with cluster(model_path) as (channel, _, _):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        metadata = (("x-request-id", bad_id),)
        call = stub.Generate(generate_request(ids_prompt(1)), metadata=metadata)
        headers = dict(await call.initial_metadata())
        assert str(headers["x-request-id"]).startswith("req-")
        assert [chunk async for chunk in call]


async def test_choices_stream_side_by_side(model_path: Path) -> None:
    async with cluster(model_path) as (channel, _, decode):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(generate_request(ids_prompt(1, 2, 3), n=3, temperature=1.0, echo=True))
        chunks = [chunk async for chunk in call]
        spec = make_spec("x", (1, 2, 3), num_choices=3, temperature=1.0)
        for choice, output in enumerate(expected_outputs(spec)):
            own = [chunk for chunk in chunks if chunk.choice == choice]
            assert [t for chunk in own for t in chunk.token_ids] == output
            assert list(own[0].prompt_token_ids) == [1, 2, 3]
            assert own[-1].finish_reason
        assert [chunk.HasField("usage") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].usage.completion_tokens == 24
        assert decode.num_opened == 1


async def test_text_and_chat_are_tokenized_by_the_models_own_rules(model_path: Path) -> None:
    async with cluster(model_path) as (channel, _, _):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        message = inference_pb2.ChatMessage(role="user", content="hi")
        chat = Prompt(chat=inference_pb2.ChatPrompt(messages=[message]))
        by_chat = await stub.Tokenize(inference_pb2.TokenizeRequest(prompt=chat))
        text = Prompt(text="<user>hi<assistant>")
        by_text = await stub.Tokenize(inference_pb2.TokenizeRequest(prompt=text))
        assert by_chat.token_ids == by_text.token_ids
        for keeps_first in (False, True):
            cut = Prompt(text="<user>hi<assistant>", keep_last=3, keeps_first=keeps_first)
            whole = by_text.token_ids
            kept = await stub.Tokenize(inference_pb2.TokenizeRequest(prompt=cut))
            assert kept.token_ids == (whole[:3] if keeps_first else whole[-3:])
            ids = Prompt(token_ids={"ids": whole}, keep_last=3, keeps_first=keeps_first)
            given = await stub.Tokenize(inference_pb2.TokenizeRequest(prompt=ids))
            assert given.token_ids == kept.token_ids
        assert by_text.max_model_len == 200, "as the workers tell, not as the files do"
        chunks = [chunk async for chunk in stub.Generate(generate_request(chat))]
        expected = expected_output(make_spec("x", by_text.token_ids))
        assert [t for chunk in chunks for t in chunk.token_ids] == expected


async def test_refusals_are_rich_and_disturb_nobody(model_path: Path) -> None:
    async with cluster(model_path) as (channel, _, decode):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        bad = await refusal(stub.Generate(generate_request(Prompt(text=""), top_p=7.0)))
        assert isinstance(bad, InvalidRequest)
        assert [v.field for v in bad.violations] == ["prompt.text", "sampling.top_p"]
        assert bad.request_id
        unknown = inference_pb2.GetModelRequest(model="other")
        assert isinstance(await refusal(stub.GetModel(unknown)), ModelNotFound)
        message = inference_pb2.ChatMessage(role="user", content="bad")
        chat = Prompt(chat=inference_pb2.ChatPrompt(messages=[message]))
        refused = await refusal(stub.Generate(generate_request(chat)))
        assert isinstance(refused, InvalidRequest)
        assert refused.violations[0].field == "prompt.chat"
        assert "no bad ones" in refused.violations[0].description
        assert decode.num_opened == 0


async def test_a_client_that_leaves_frees_the_decode_worker(model_path: Path) -> None:
    async with cluster(model_path, is_holding=True) as (channel, _, decode):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(generate_request(ids_prompt(1, 2, 3)))
        await call.read()
        await decode.wait_until_holding(1)
        call.cancel()
        await decode.wait_until_holding(0)


@pytest.mark.slow
async def test_a_clients_deadline_frees_the_decode_worker(model_path: Path) -> None:
    async with cluster(model_path, is_holding=True) as (channel, _, decode):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(generate_request(ids_prompt(1, 2, 3)), timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [chunk async for chunk in call]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await decode.wait_until_holding(0)


async def test_an_end_token_that_the_model_cannot_give_is_passed_over(model_path: Path) -> None:
    config = {"max_position_embeddings": 300, "eos_token_id": [5, 97]}  # of 97 tokens
    (model_path / "config.json").write_text(json.dumps(config))
    async with cluster(model_path) as (channel, _, decode):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        _ = [chunk async for chunk in stub.Generate(generate_request(ids_prompt(1, 2, 3)))]
        assert [spec.sampling.stop_token_ids for spec in decode.specs.values()] == [{5}]


async def test_the_model_is_described_with_its_workers(model_path: Path) -> None:
    async with cluster(model_path) as (channel, _, _):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        model = (await stub.GetModel(inference_pb2.GetModelRequest(model="m"))).model
        assert (model.name, model.max_model_len, model.vocab_size) == ("m", 200, 97)
        assert model.has_chat_template
        assert [(w.worker_id, w.tier, w.state) for w in model.workers] == [
            ("p", "prefill", "ready"),
            ("d", "decode", "ready"),
        ]
        assert model.workers[1].num_blocks == 64
        assert not model.sampling_defaults.ListFields()
        listed = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert [m.name for m in listed] == ["m"]


@pytest.mark.parametrize(("source", "temperature"), [("auto", 0.5), ("none", 1.0)])
async def test_the_models_sampling_defaults_reach_the_tiers_and_are_shown(
    model_path: Path, source: str, temperature: float
) -> None:
    (model_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    decode = GrpcWorker(make_info("d", Tier.DECODE))
    async with (
        serving(decode) as d,
        gateway(model_path, decode_workers=(d.address,), generation_config=source) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        listed = await stub.ListModels(inference_pb2.ListModelsRequest())
        (shown,) = models_of(listed)
        expected = {"temperature": 0.5} if source == "auto" else {}
        assert shown.sampling_defaults.given == expected
        params = sampling_pb2.SamplingParams(max_tokens=2)
        request = inference_pb2.GenerateRequest(prompt=ids_prompt(1, 2), sampling=params)
        _ = [chunk async for chunk in stub.Generate(request)]
        assert [spec.sampling.temperature for spec in decode.specs.values()] == [temperature]


async def test_a_gateway_without_workers_serves_and_says_so(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "WORKERS_TIMEOUT_S", 0.0)
    decode = GrpcWorker(make_info("d", Tier.DECODE))
    async with serving(decode) as running:
        address, port = running.address, running.port
    async with gateway(model_path, decode_workers=(address,)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        missing = await refusal(stub.Generate(generate_request(ids_prompt(1))))
        assert isinstance(missing, NoWorkers)
        assert missing.retry_after_s
        async with serving(decode, port):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            chunks = [c async for c in stub.Generate(generate_request(ids_prompt(1)))]
            assert chunks[-1].usage.completion_tokens == 8
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_a_missing_tokenizer_is_a_clear_refusal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        async with gateway(tmp_path):
            pass
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        async with gateway(tmp_path):
            pass
