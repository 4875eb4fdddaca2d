"""Bad requests against the whole system: refused with the field's name, the value and the fix, and
nobody else notices."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.client import SamplingParams
from baton.errors import BatonError, InvalidRequest, ModelNotFound
from baton.rpc.channel import aio_channel
from baton.rpc.status import from_rpc_error
from baton.types import Sampling
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from engine.oracle import oracle_tokens
from tests.support.live_tiers import LiveSystem, live_system

Edit = Callable[[inference_pb2.GenerateRequest], object]


@pytest.fixture
async def system() -> AsyncIterator[LiveSystem]:
    options = {"max_model_len": 500, "num_gpu_blocks_override": 200, "oracle_step_ms": 1.0}
    async with live_system(worker_options=options) as running:
        yield running


def request_with(edit: Edit) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3])),
        sampling=sampling_pb2.SamplingParams(max_tokens=4),
    )
    edit(request)
    return request


def sampling(**fields: Any) -> Edit:
    return lambda request: request.sampling.MergeFrom(sampling_pb2.SamplingParams(**fields))


def beams(width: int, length_penalty: float | None = None, **fields: Any) -> Edit:
    search = sampling_pb2.BeamSearch(width=width, length_penalty=length_penalty)
    return sampling(beam_search=search, **fields)


def token_ids(ids: list[int]) -> Edit:
    return lambda request: request.prompt.CopyFrom(
        inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=ids))
    )


def bias(token_id: int, value: float) -> Edit:
    return lambda request: request.sampling.logit_bias.update({token_id: value})


BAD = [
    pytest.param(lambda r: r.ClearField("prompt"), "prompt", id="no-prompt"),
    pytest.param(token_ids([]), "prompt", id="no-tokens"),
    pytest.param(lambda r: setattr(r.prompt, "text", ""), "prompt", id="empty-text"),
    pytest.param(token_ids([1] * 600), "prompt", id="longer-than-the-model"),
    pytest.param(token_ids([1, 1000]), "prompt.token_ids", id="id-out-of-range"),
    pytest.param(token_ids([1, 2**32 - 1]), "prompt.token_ids", id="id-far-out-of-range"),
    pytest.param(sampling(n=0), "sampling.n", id="n-0"),
    pytest.param(sampling(n=1000), "sampling.n", id="n-1000"),
    pytest.param(sampling(n=4, best_of=2), "sampling.best_of", id="best-of-below-n"),
    pytest.param(sampling(best_of=2**32 - 1), "sampling.best_of", id="best-of-huge"),
    pytest.param(sampling(prompt_logprobs=1000), "sampling.prompt_logprobs", id="prompt-logprobs"),
    pytest.param(sampling(bad_words=["x"] * 1000), "sampling.bad_words", id="1000-bad-words"),
    pytest.param(sampling(bad_words=["x" * 5000]), "sampling.bad_words", id="long-bad-word"),
    pytest.param(sampling(bad_words=["ok", "<|endoftext|>"]), "sampling.bad_words", id="bad-eos"),
    pytest.param(beams(width=0), "sampling.beam_search.width", id="no-beams"),
    pytest.param(beams(width=2**32 - 1), "sampling.beam_search.width", id="beams-without-end"),
    pytest.param(
        beams(width=2, length_penalty=math.nan), "sampling.beam_search.length", id="nan-length"
    ),
    pytest.param(beams(width=2, n=3), "sampling.n", id="more-outputs-than-beams"),
    pytest.param(beams(width=2, temperature=0.5), "sampling.temperature", id="beams-drawn"),
    pytest.param(sampling(temperature=math.nan), "sampling.temperature", id="nan-temperature"),
    pytest.param(sampling(temperature=math.inf), "sampling.temperature", id="inf-temperature"),
    pytest.param(sampling(temperature=-1.0), "sampling.temperature", id="negative-temperature"),
    pytest.param(sampling(top_p=0.0), "sampling.top_p", id="top-p-0"),
    pytest.param(sampling(top_p=math.nan), "sampling.top_p", id="nan-top-p"),
    pytest.param(sampling(min_p=1.5), "sampling.min_p", id="min-p"),
    pytest.param(sampling(repetition_penalty=0.0), "sampling.repetition_penalty", id="rep-0"),
    pytest.param(sampling(presence_penalty=-math.inf), "sampling.presence_penalty", id="inf-pres"),
    pytest.param(sampling(frequency_penalty=3.0), "sampling.frequency_penalty", id="frequency"),
    pytest.param(sampling(max_tokens=0), "sampling.max_tokens", id="max-tokens-0"),
    pytest.param(sampling(max_tokens=10**6), "sampling.max_tokens", id="max-tokens-huge"),
    pytest.param(sampling(min_tokens=9), "sampling.min_tokens", id="min-above-max"),
    pytest.param(sampling(logprobs=1000), "sampling.logprobs", id="logprobs"),
    pytest.param(sampling(stop=["x"] * 1000), "sampling.stop", id="1000-stop-strings"),
    pytest.param(sampling(stop=[""]), "sampling.stop", id="empty-stop-string"),
    pytest.param(sampling(stop=["x" * 5000]), "sampling.stop", id="long-stop-string"),
    pytest.param(sampling(stop_token_ids=[5000]), "sampling.stop_token_ids", id="stop-id"),
    pytest.param(bias(5000, 1.0), "sampling.logit_bias", id="bias-key"),
    pytest.param(bias(5, math.nan), "sampling.logit_bias", id="bias-nan"),
    pytest.param(lambda r: setattr(r, "priority", 5000), "priority", id="priority"),
    pytest.param(lambda r: setattr(r, "cache_salt", "s" * 1000), "cache_salt", id="cache-salt"),
]


@pytest.mark.slow
async def test_each_is_refused_by_its_field_and_a_running_stream_goes_on(
    system: LiveSystem,
) -> None:
    async with aio_channel(system.gateway) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        undisturbed = asyncio.create_task(system.client.generate([7, 8, 9], params))
        for case in BAD:
            edit, field = case.values
            assert callable(edit)
            error = await refusal(stub, request_with(edit))
            assert isinstance(error, InvalidRequest), case.id
            assert any(v.field.startswith(str(field)) for v in error.violations), (case.id, error)
            assert all(len(v.description) > 10 for v in error.violations)
            assert error.request_id
        done = await undisturbed
        expected = oracle_tokens([7, 8, 9], Sampling(max_tokens=400), 1000)
        assert list(done.token_ids) == expected
        await system.until_quiet()


async def test_all_wrong_fields_are_named_at_once(system: LiveSystem) -> None:
    async with aio_channel(system.gateway) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        error = await refusal(stub, request_with(sampling(top_p=7.0, n=0, temperature=math.nan)))
        assert isinstance(error, InvalidRequest)
        fields = {violation.field for violation in error.violations}
        assert {"sampling.top_p", "sampling.n", "sampling.temperature"} <= fields


async def test_an_unknown_model_is_not_found(system: LiveSystem) -> None:
    with pytest.raises(ModelNotFound, match="nonesuch"):
        await system.client.generate([1], model="nonesuch")


async def test_lone_surrogates_never_leave_the_client(system: LiveSystem) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await system.client.generate("ab\ud800")
    assert refused.value.violations[0].field.startswith("prompt")
    with pytest.raises(InvalidRequest):
        await system.client.generate("ab", stop=["\udfff"])


@pytest.mark.slow
async def test_metadata_too_large_is_a_clear_error(system: LiveSystem) -> None:
    async with aio_channel(system.gateway) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(
            request_with(lambda _: None), metadata=(("x-large", "y" * 100_000),), timeout=30
        )
        with pytest.raises(grpc.RpcError) as refused:
            await call.read()
        error = from_rpc_error(refused.value)
        assert isinstance(error, InvalidRequest)
        assert "metadata" in error.message
    await system.client.generate([1, 2], max_tokens=2)


async def refusal(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub, request: inference_pb2.GenerateRequest
) -> BatonError:
    with pytest.raises(grpc.RpcError) as refused:
        await stub.Generate(request, timeout=30).read()
    return from_rpc_error(refused.value)
