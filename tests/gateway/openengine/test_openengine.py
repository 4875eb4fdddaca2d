"""The gateway as an engine of OpenEngine's, asked by a client made of that project's own protos:
4def7c50.binpb is their image (protoc --include_imports, without comments)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Draining,
    EngineFault,
    FieldViolation,
    HandoffFailed,
    InvalidRequest,
    Overloaded,
)
from baton.v1 import inference_pb2
from gateway.long_work import Turns
from gateway.openengine.output import EventStream
from gateway.openengine.service import OpenEngineService
from gateway.openengine.v1 import openengine_pb2 as ours
from tests.support.live_tiers import LiveSystem, live_system
from tests.support.oracle_model import make_oracle_model

PROMPT = "the quick brown fox jumps over the lazy dog"
Events = list[Any]


def _pool() -> tuple[DescriptorPool, FileDescriptorSet]:
    image = FileDescriptorSet.FromString(Path(__file__).with_name("4def7c50.binpb").read_bytes())
    pool = DescriptorPool()
    for file in image.file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    return pool, image


POOL, IMAGE = _pool()


def theirs(name: str) -> Any:
    """A message's class."""
    return GetMessageClass(POOL.FindMessageTypeByName(f"openengine.v1.{name}"))


class Client:
    """A client of the protocol."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def generate(
        self, metadata: Sequence[tuple[str, str]] = (), **fields: Any
    ) -> grpc.aio.UnaryStreamCall[Any, Any]:
        call = self._channel.unary_stream(
            "/openengine.v1.Inference/Generate",
            request_serializer=theirs("GenerateRequest").SerializeToString,
            response_deserializer=theirs("GenerateResponse").FromString,
        )
        if "token_ids" not in fields:
            fields.setdefault("prompt", PROMPT)
        request = theirs("GenerateRequest")(**fields)
        return call(request, metadata=metadata)

    async def events(self, **fields: Any) -> Events:
        return [event async for event in self.generate(**fields)]

    async def control(self, method: str, **fields: Any) -> Any:
        found = POOL.FindServiceByName("openengine.v1.Control").methods_by_name[method]
        call = self._channel.unary_unary(
            f"/openengine.v1.Control/{method}",
            request_serializer=GetMessageClass(found.input_type).SerializeToString,
            response_deserializer=GetMessageClass(found.output_type).FromString,
        )
        return await call(GetMessageClass(found.input_type)(**fields))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_oracle_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(folder: Path) -> AsyncIterator[LiveSystem]:
    """In the end nothing of any request is left in it."""
    options = {"model": str(folder), "served_model_name": "m"}
    async with live_system(
        worker_options=options,
        gateway_options={**options, "enable_openengine": True, "served_model_aliases": ("alias",)},
    ) as running:
        yield running
        await running.until_quiet()


@pytest_asyncio.fixture(loop_scope="module")
async def client(system: LiveSystem) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(system.gateway) as channel:
        yield Client(channel)


pytestmark = pytest.mark.asyncio(loop_scope="module")


def _tokens(events: Events, index: int = 0) -> list[int]:
    outputs = [e.token for e in events if e.HasField("token") and e.token.output_index == index]
    return [info.token_id for output in outputs for info in output.tokens]


def _text(events: Events, index: int = 0) -> str:
    return "".join(e.token.text for e in events if e.token.output_index == index)


async def _refusal(call: grpc.aio.UnaryStreamCall[Any, Any]) -> grpc.aio.AioRpcError:
    """No event comes of what is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(call))
    return caught.value


def _shape(found: Descriptor | EnumDescriptor) -> Any:
    """All that the wire knows of a type."""
    if isinstance(found, EnumDescriptor):
        return {value.name: value.number for value in found.values}
    return {
        field.name: (
            *(field.number, field.type, field.is_repeated, field.has_presence),
            field.message_type.full_name if field.message_type else None,
            field.enum_type.full_name if field.enum_type else None,
            field.containing_oneof.name if field.containing_oneof else None,
        )
        for field in found.fields
    }


def _types() -> Iterator[tuple[str, Descriptor | EnumDescriptor]]:
    for file in IMAGE.file:
        if file.package == "openengine.v1":
            for message in file.message_type:
                yield message.name, POOL.FindMessageTypeByName(f"openengine.v1.{message.name}")
            for enum in file.enum_type:
                yield enum.name, POOL.FindEnumTypeByName(f"openengine.v1.{enum.name}")


async def test_the_protocol_is_theirs() -> None:
    found = ours.DESCRIPTOR
    mine = {**found.message_types_by_name, **found.enum_types_by_name}
    assert {name: _shape(kind) for name, kind in mine.items()} == {
        name: _shape(kind) for name, kind in _types()
    }
    for service in ("Inference", "Control"):
        wanted = POOL.FindServiceByName(f"openengine.v1.{service}")
        assert {
            (m.name, m.input_type.full_name, m.output_type.full_name, m.server_streaming)
            for m in found.services_by_name[service].methods
        } == {
            (m.name, m.input_type.full_name, m.output_type.full_name, m.server_streaming)
            for m in wanted.methods
        }


async def test_tokens_are_those_of_batons_own_door(client: Client, system: LiveSystem) -> None:
    own = await system.client.generate(PROMPT, max_tokens=12, n=2, seed=7)
    token_ids = (await system.client.tokenize(PROMPT)).token_ids
    for given in ({"prompt": PROMPT}, {"token_ids": {"ids": token_ids}}):
        events = await client.events(
            **given,
            request_id="r1",
            model="alias",
            sampling={"num_sequences": 2, "seed": 7},
            stopping={"max_tokens": 12},
        )
        assert {event.request_id for event in events} == {"r1"}
        for index, choice in enumerate(own.choices):
            assert _tokens(events, index) == list(choice.token_ids)
            assert _text(events, index) == choice.text
        finished = [e.finished for e in events if e.HasField("finished")]
        assert sorted(f.output_index for f in finished) == [0, 1]
        assert {f.reason for f in finished} == {ours.FINISH_REASON_LENGTH}
        *earlier, last = events
        assert not any(event.HasField("usage") for event in earlier)
        assert last.usage.completion_tokens == 24
        assert last.usage.prompt_tokens == own.usage.prompt_tokens
        assert last.usage.total_tokens == last.usage.prompt_tokens + 24


async def test_what_stopped_an_output_is_named(client: Client, system: LiveSystem) -> None:
    own = await system.client.generate(PROMPT, max_tokens=12, temperature=0.0)
    greedy = {"sampling": {"temperature": 0.0}}
    third = own.choices[0].token_ids[2]
    events = await client.events(
        **greedy, stopping={"max_tokens": 12, "conditions": [{"stop_token_id": third}]}
    )
    assert events[-1].finished.reason == ours.FINISH_REASON_STOP
    assert events[-1].finished.stop_match.stop_token_id == third
    stop = own.text[4:7]
    for keeps in (False, True):
        events = await client.events(
            **greedy,
            stopping={
                "max_tokens": 12,
                "conditions": [{"stop_text": stop}],
                "include_stop_in_output": keeps,
            },
        )
        assert events[-1].finished.stop_match.stop_text == stop
        assert _text(events).endswith(stop) == keeps


async def test_log_probabilities_of_prompt_and_output(client: Client, system: LiveSystem) -> None:
    events = await client.events(
        stopping={"max_tokens": 3},
        sampling={"temperature": 0.0},
        response={
            "return_prompt_logprobs": True,
            "prompt_candidates": {"top_n": 2},
            "prompt_logprob_start": 3,
            "return_output_logprobs": True,
            "output_candidates": {"top_n": 2},
        },
    )
    first, *rest = events
    token_ids = (await system.client.tokenize(PROMPT)).token_ids
    assert [t.token_id for t in first.prompt.tokens] == list(token_ids)
    assert [t.HasField("logprob") for t in first.prompt.tokens[:4]] == [False, False, False, True]
    assert not any(event.HasField("prompt") for event in rest)
    infos = [info for event in rest for info in event.token.tokens]
    assert len(infos) == 3
    for info in infos:
        assert info.HasField("logprob")
        assert info.logprob <= 0
        assert [candidate.rank for candidate in info.candidates] == [1, 2]
        ranks = {candidate.token_id: candidate.rank for candidate in info.candidates}
        assert (info.rank if info.HasField("rank") else None) == ranks.get(info.token_id)


@pytest.mark.parametrize(
    ("guided", "wanted"),
    [
        ({"choice": {"choices": ["yes", "no"]}}, ("yes", "no")),
        ({"regex": "a{3}"}, ("aaa",)),
        ({"ebnf_grammar": 'start: "xy"'}, ("xy",)),
        ({"json_schema": '{"const": 5}'}, ("5",)),
    ],
)
async def test_guides_hold(client: Client, guided: dict[str, Any], wanted: Sequence[str]) -> None:
    events = await client.events(guided=guided, stopping={"max_tokens": 20})
    assert _text(events).strip() in wanted


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"media": [{"url": "http://x"}]}, "INVALID_ARGUMENT", "media"),
        ({"kv": {"session": {"session_id": "s"}}}, "INVALID_ARGUMENT", "kv.session"),
        ({"kv": {"bypass_prefix_cache": True}}, "INVALID_ARGUMENT", "kv.bypass_prefix_cache"),
        ({"guided": {"regex": "a", "backend": "x"}}, "INVALID_ARGUMENT", "guided.backend: 'x'"),
        ({"guided": {"structural_tag": "{}"}}, "INVALID_ARGUMENT", "guided.structural_tag"),
        ({"guided": {"regex": "("}}, "INVALID_ARGUMENT", "guided.regex"),
        ({"sampling": {"top_k": -2}}, "INVALID_ARGUMENT", "sampling.top_k: -2"),
        ({"sampling": {"num_sequences": 0}}, "INVALID_ARGUMENT", "sampling.num_sequences: 0"),
        ({"sampling": {"top_p": 2.0}}, "INVALID_ARGUMENT", "sampling.top_p: 2"),
        ({"stopping": {"max_tokens": 0}}, "INVALID_ARGUMENT", "stopping.max_tokens: 0"),
        ({"prompt": ""}, "INVALID_ARGUMENT", "prompt: "),
        ({"token_ids": {"ids": [10**9]}}, "INVALID_ARGUMENT", "token_ids"),
        (
            {"response": {"return_output_logprobs": True, "output_candidates": {"all": {}}}},
            "INVALID_ARGUMENT",
            "response.output_candidates.all",
        ),
        (
            {"response": {"return_output_logprobs": True, "output_candidates": {"top_n": 21}}},
            "INVALID_ARGUMENT",
            "response.output_candidates: 21",
        ),
        ({"metadata": [("openengine-priority", "x")]}, "INVALID_ARGUMENT", "openengine-priority"),
        (
            {"metadata": [("openengine-priority", "1"), ("openengine-priority", "2")]},
            "INVALID_ARGUMENT",
            "openengine-priority",
        ),
        (
            {"metadata": [("openengine-target-dp-rank", "1")]},
            "INVALID_ARGUMENT",
            "openengine-target-dp-rank: '1'",
        ),
        ({"model": "other"}, "NOT_FOUND", "other"),
        ({"lora_name": "other"}, "NOT_FOUND", "other"),
    ],
)
async def test_what_is_refused_is_named_by_their_field_before_it_is_accepted(
    client: Client, fields: dict[str, Any], code: str, words: str
) -> None:
    error = await _refusal(client.generate(**fields))
    assert error.code().name == code
    assert words in (error.details() or "")


async def test_an_abort_ends_a_request_once_and_for_all(client: Client) -> None:
    call = client.generate(
        request_id="long",
        stopping={"max_tokens": 2000, "ignore_eos": True},
        sampling={"num_sequences": 2},
    )
    first = await anext(aiter(call))
    twin = await _refusal(client.generate(request_id="long"))
    assert twin.code() == grpc.StatusCode.ALREADY_EXISTS
    assert (await client.control("Abort", request_id="long")).status == ours.ABORT_STATUS_ABORTED
    events = [first, *[event async for event in call]]
    finished = [event.finished for event in events if event.HasField("finished")]
    assert [f.reason for f in finished] == [ours.FINISH_REASON_CANCELLED] * 2
    num_tokens = len(_tokens(events, 0)) + len(_tokens(events, 1))
    assert events[-1].usage.completion_tokens == num_tokens < 4000
    again = await client.control("Abort", request_id="long")
    assert again.status == ours.ABORT_STATUS_ALREADY_FINISHED


async def test_an_abort_does_not_tread_on_the_piece_that_is_being_sent() -> None:
    sent: list[str | None] = []
    is_writing, may_go_on = asyncio.Event(), asyncio.Event()

    async def write(response: ours.GenerateResponse) -> None:
        assert not is_writing.is_set(), "grpc takes one message at a time"
        is_writing.set()
        await may_go_on.wait()
        is_writing.clear()
        sent.append(response.WhichOneof("event"))

    events = EventStream(write, "id", inference_pb2.GenerateRequest(), 0, (), lambda _: b"")
    piece = asyncio.create_task(
        events.write_piece(inference_pb2.GenerateResponse(token_ids=[1, 2], text="ab"))
    )
    await is_writing.wait()
    piece.cancel()
    await asyncio.wait({piece})
    end = asyncio.create_task(events.cancel())
    await asyncio.sleep(0)
    assert not end.done()
    may_go_on.set()
    await end
    assert sent == ["token", "finished"]


async def test_all_requests_are_aborted_at_once(client: Client) -> None:
    calls = [client.generate(stopping={"max_tokens": 2000, "ignore_eos": True}) for _ in range(3)]
    started = [await anext(aiter(call)) for call in calls]
    assert len(started) == 3
    assert (await client.control("Abort", all_requests={})).message == "3 requests"
    for call in calls:
        *_, last = [event async for event in call]
        assert last.finished.reason == ours.FINISH_REASON_CANCELLED


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ({}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"request_id": "nobody's"}, grpc.StatusCode.NOT_FOUND),
        ({"kv_session": {"session_id": "s"}}, grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_aborts_of_nothing(
    client: Client, target: dict[str, Any], code: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.control("Abort", **target)
    assert caught.value.code() == code


async def test_a_cancelled_call_leaves_nothing(client: Client, system: LiveSystem) -> None:
    call = client.generate(stopping={"max_tokens": 2000, "ignore_eos": True})
    await anext(aiter(call))
    call.cancel()
    await system.until_quiet()
    async with asyncio.timeout(60):
        while (await client.control("GetLoad")).running_requests:
            await asyncio.sleep(0)


async def test_an_engine_says_what_it_is(client: Client) -> None:
    info = await client.control("GetServerInfo")
    assert (info.engine_name, info.engine_role) == ("baton", ours.ENGINE_ROLE_AGGREGATED)
    assert (info.schema_revision, info.minimum_client_revision) == (1, 1)
    assert set(info.supported_models) >= {"m", "alias"}
    assert info.capacity.total_kv_blocks > 0
    model = await client.control("GetModelInfo", model="alias")
    assert model.served_model_name == "m"
    assert model.generation.output_logprobs.max_top_n == 20
    assert model.max_output_tokens == model.max_context_length - 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.control("GetModelInfo", model="other")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    load = await client.control("GetLoad")
    assert load.total_kv_blocks == info.capacity.total_kv_blocks
    assert list((await client.control("ListLoras")).adapters) == []
    assert list((await client.control("GetKvEventSources")).sources) == []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.control("LoadLora", adapter={"lora_name": "x"})
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_health_with_a_probe(client: Client) -> None:
    found = await client.control("Health", include_inference_probe=True)
    assert found.state == ours.HEALTH_STATE_READY
    assert [check.name for check in found.checks] == ["scheduler", "inference_probe"]
    wrong = await client.control("Health", role=ours.ENGINE_ROLE_DECODE)
    assert wrong.state == ours.HEALTH_STATE_NOT_READY
    unknown = await client.control("Health", include_inference_probe=True, model="other")
    assert "other" in unknown.checks[-1].message


class _Failing:
    """A model that fails all requests."""

    def __init__(self, error: Exception, *, is_admitted: bool) -> None:
        self._error, self._is_admitted = error, is_admitted
        self.facts = SimpleNamespace(eos_token_ids=frozenset())
        self.tokenizer = SimpleNamespace(bytes_of=None)

    async def tokenize(self, _: Any) -> tuple[int, ...]:
        return (1, 2)

    async def generate(self, _: Any, call: Any) -> None:
        if self._is_admitted:
            await call.on_admitted("r")
        raise self._error


class _Context:
    """Context of a call; keeps what is written."""

    def __init__(self) -> None:
        self.events: Events = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None

    async def send_initial_metadata(self, _: object) -> None:
        pass

    async def write(self, event: Any) -> None:
        self.events.append(event)


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (Overloaded("full"), ours.ERROR_CODE_OVERLOADED, True),
        (Draining("away"), ours.ERROR_CODE_DRAINING, True),
        (HandoffFailed("lost"), ours.ERROR_CODE_KV_TRANSFER_FAILED, True),
        (DeadlineExceeded("late"), ours.ERROR_CODE_CANCELLED, False),
        (EngineFault("broken"), ours.ERROR_CODE_INTERNAL, False),
        (
            InvalidRequest.of(FieldViolation("sampling.max_tokens", "9: too many")),
            ours.ERROR_CODE_INVALID_ARGUMENT,
            False,
        ),
    ],
)
async def test_a_failure_is_the_calls_before_acceptance_and_an_event_after_it(
    error: BatonError, code: int, retryable: bool
) -> None:
    for is_admitted in (False, True):
        models: Any = SimpleNamespace(
            turns=Turns(), of=lambda _, given=is_admitted: _Failing(error, is_admitted=given)
        )
        context: Any = _Context()
        call = OpenEngineService(models, "i").Generate(
            ours.GenerateRequest(request_id="r", prompt="x"), context
        )
        if not is_admitted:
            with pytest.raises(type(error)):
                await call
            assert context.events == []
            continue
        await call
        (event,) = context.events
        assert (event.request_id, event.error.code) == ("r", code)
        assert event.error.retryable == retryable
        if isinstance(error, InvalidRequest):
            assert "stopping.max_tokens: 9" in event.error.message


@pytest.mark.slow
async def test_workers_that_were_never_reached_count_for_nothing() -> None:
    """With several models, each lists the workers that no model is known of yet."""
    reached = inference_pb2.WorkerStatus(
        worker_id="d0", tier="decode", num_blocks=10, block_size=16, num_running=2
    )
    unreached = inference_pb2.WorkerStatus(address="somewhere:1", tier="decode", num_in_flight=1)
    models: Any = [
        SimpleNamespace(
            model=lambda given=workers: inference_pb2.Model(workers=given),
            facts=SimpleNamespace(names=("m",)),
            num_waiting=0,
        )
        for workers in ([unreached, reached], [unreached])
    ]
    engine = OpenEngineService(models, "i")
    context: Any = None
    info = await engine.GetServerInfo(ours.GetServerInfoRequest(), context)
    assert (info.capacity.kv_block_size, info.capacity.total_kv_blocks) == (16, 10)
    load = await engine.GetLoad(ours.GetLoadRequest(), context)
    assert (load.running_requests, load.total_kv_blocks) == (2, 10)
    models.pop(0)
    info = await engine.GetServerInfo(ours.GetServerInfoRequest(), context)
    assert not info.capacity.HasField("kv_block_size")
