"""Whatever a handler raises becomes the right status; health and reflection are there; the end is
orderly."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from baton.errors import (
    BY_REASON,
    BatonError,
    ConfigError,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
)
from baton.rpc.channel import aio_channel, sync_channel
from baton.rpc.server import RunningServer, start_server
from baton.rpc.status import from_rpc_error
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.support.fake_inference import SECRET, SERVICE, FakeInference

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Stub = Any


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Stub:
    return inference_pb2_grpc.InferenceServiceStub(channel)


@pytest.fixture
def health(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


async def generate(stub: Stub, model: str) -> list[Any]:
    return [piece async for piece in stub.Generate(inference_pb2.GenerateRequest(model=model))]


async def tokenize(stub: Stub, model: str = "", **call: Any) -> Any:
    return await stub.Tokenize(inference_pb2.TokenizeRequest(model=model), **call)


async def status_of(stub: Stub, act: Callable[..., Any], *args: Any) -> BatonError:
    with pytest.raises(grpc.RpcError) as caught:
        await act(stub, *args)
    assert isinstance(caught.value, grpc.aio.AioRpcError)
    error = from_rpc_error(caught.value)
    assert caught.value.code() is error.code
    return error


@pytest.mark.parametrize("reason", sorted(BY_REASON))
@pytest.mark.parametrize("act", [generate, tokenize])
async def test_every_error_reaches_the_caller(
    fake: FakeInference, stub: Stub, reason: str, act: Callable[..., Any]
) -> None:
    fake.failures.append(BY_REASON[reason]("what happened", request_id="r-1", key="value"))
    error = await status_of(stub, act, "")
    assert type(error) is BY_REASON[reason]
    assert (error.message, error.request_id) == ("what happened", "r-1")
    assert error.metadata == {"key": "value"}


async def test_an_error_after_the_first_piece_reaches_the_caller(
    fake: FakeInference, stub: Stub
) -> None:
    fake.failures_after_first.append(InvalidRequest("late", request_id="r-1"))
    call = stub.Generate(inference_pb2.GenerateRequest(model="hang"))
    assert (await call.read()).token_ids == [1]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert from_rpc_error(caught.value).message == "late"


@pytest.mark.parametrize("act", [generate, tokenize])
async def test_an_unforeseen_exception_is_logged_without_its_text(
    stub: Stub, act: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        error = await status_of(stub, act, "crash")
    assert isinstance(error, EngineFault)
    (record,) = (r for r in caplog.records if r.name == "baton.rpc.interceptor")
    assert record.__dict__["request_id"] == error.request_id != ""
    assert "fake_inference.py" in record.getMessage()
    assert "KeyError" in record.getMessage()
    assert error.request_id in error.message
    # The line of source may name the variable; the value must not be there.
    assert SECRET not in record.getMessage() + error.message


async def test_an_unforeseen_exception_bears_the_callers_request_id(stub: Stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokenize(stub, "crash", metadata=[("x-request-id", "mine:1")])
    assert from_rpc_error(caught.value).request_id == "mine:1"


#: Field 1 says to be of 127 bytes, and is not.
GARBAGE = b"\x0a\x7f"


@pytest.mark.parametrize(
    "method",
    [
        f"{SERVICE}/Generate",
        f"{SERVICE}/Tokenize",
        f"{SERVICE}/GetModel",
        "grpc.health.v1.Health/Check",
        "grpc.health.v1.Health/Watch",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_what_is_no_message_is_the_callers_fault_and_not_logged(
    fake: FakeInference,
    channel: grpc.aio.Channel,
    method: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # As a stream of one, whatever the call is: on the wire it is the same.
    call = channel.stream_stream(f"/{method}")(iter([GARBAGE]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.code is caught.value.code()
    assert "the 2 bytes sent are no message of this call" in error.message
    assert not fake.requests
    assert not caplog.records


async def test_a_status_that_nobody_waits_for_any_more_is_not_logged(
    fake: FakeInference, server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    is_over = threading.Event()

    def outlast(_request: Any, _context: Any) -> None:
        is_over.wait()  # the loop learns of the call's end after this
        raise DeadlineExceeded("too late")

    fake._note = outlast  # type: ignore[method-assign]

    def call() -> None:
        is_over.clear()
        with sync_channel(server.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Tokenize(inference_pb2.TokenizeRequest(), timeout=0.05)
            is_over.set()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    for _ in range(5):
        await asyncio.to_thread(call)
    await server.stop()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_a_startup_error_never_travels_as_such(fake: FakeInference, stub: Stub) -> None:
    fake.failures.append(ConfigError.of("--port", 1, "choose another"))
    assert isinstance(await status_of(stub, tokenize), EngineFault)


async def test_cancelling_a_call_runs_the_handlers_clean_up(
    fake: FakeInference, stub: Stub
) -> None:
    call = stub.Generate(inference_pb2.GenerateRequest(model="hang"))
    await call.read()
    call.cancel()
    assert await asyncio.to_thread(fake.ended.get) == ("hang", "cancelled")
    assert (await tokenize(stub)).max_model_len == 4096


async def test_a_deadline_ends_the_handler(fake: FakeInference, stub: Stub) -> None:
    call = stub.Generate(inference_pb2.GenerateRequest(model="hang"), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in call]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await asyncio.to_thread(fake.ended.get) == ("hang", "cancelled")


async def test_too_much_metadata_is_the_callers_fault(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await tokenize(stub, metadata=[("key", "v" * 40_000)])
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "metadata"


@pytest.mark.slow
async def test_too_large_a_message_is_the_callers_fault(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[2**31] * 4_000_000))
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "message"


async def test_a_port_in_use_is_told_with_its_fix(server: RunningServer) -> None:
    with pytest.raises(ConfigError, match=f"{server.port}.*port 0"):
        await start_server(server.address, lambda _: ())


async def test_servers_share_a_port_if_all_ask_for_it_and_only_then() -> None:
    first = await start_server("127.0.0.1:0", lambda _: (), reuse_port=True)
    try:
        second = await start_server(first.address, lambda _: (), reuse_port=True)
        assert second.port == first.port
        with pytest.raises(ConfigError, match=f"{first.port}"):
            await start_server(first.address, lambda _: ())
        # Whoever of the two is gone, the other answers.
        await first.stop()
        async with aio_channel(second.address) as channel:
            assert await check(health_pb2_grpc.HealthStub(channel)) == SERVING
        await second.stop()
    finally:
        await first.stop()


@pytest.mark.parametrize("address", ["localhost", "localhost:", "127.0.0.1:http"])
async def test_an_address_needs_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        await start_server(address, lambda _: ())


async def check(health: Any, service: str = "") -> Any:
    return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_is_kept_per_service(server: RunningServer, health: Any) -> None:
    assert server.service_names == ("", SERVICE)
    server.set_serving(SERVICE, False)
    assert (await check(health), await check(health, SERVICE)) == (SERVING, NOT_SERVING)
    statuses = (await health.List(health_pb2.HealthListRequest())).statuses
    assert {name: s.status for name, s in statuses.items()} == {"": SERVING, SERVICE: NOT_SERVING}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(health, "no.such.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(KeyError):
        server.set_serving("no.such.Service", True)


async def test_watch_tells_each_change_and_ends_with_the_server(
    server: RunningServer, health: Any
) -> None:
    watch = aiter(health.Watch(health_pb2.HealthCheckRequest(service=SERVICE)))
    assert (await anext(watch)).status == SERVING
    server.set_serving(SERVICE, True)
    server.set_serving(SERVICE, False)
    assert (await anext(watch)).status == NOT_SERVING
    server.set_serving(SERVICE, True)
    assert (await anext(watch)).status == SERVING
    stopping = asyncio.create_task(server.stop(grace_s=60))
    assert [seen.status async for seen in watch] == [NOT_SERVING]
    await stopping


async def test_watching_an_unknown_service_says_so(health: Any) -> None:
    watch = health.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
    assert (await watch.read()).status == UNKNOWN
    watch.cancel()


async def test_health_follows_the_engine_loop(server: RunningServer, health: Any) -> None:
    is_alive = True
    driver = asyncio.create_task(server.drive_health(lambda: is_alive, period_s=0.001))
    watch = aiter(health.Watch(health_pb2.HealthCheckRequest(service=SERVICE)))
    assert (await anext(watch)).status == SERVING
    is_alive = False
    assert (await anext(watch)).status == NOT_SERVING
    assert await check(health) == NOT_SERVING
    await server.stop()
    await driver


async def test_health_is_asked_for_periodically(server: RunningServer, health: Any) -> None:
    asked = asyncio.Semaphore(0)

    def is_alive() -> bool:
        asked.release()
        return False

    driver = asyncio.create_task(server.drive_health(is_alive, period_s=0.001))
    for _ in range(5):
        await asked.acquire()
    assert await check(health) == NOT_SERVING
    driver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driver


async def test_a_failing_heartbeat_is_not_health(server: RunningServer, health: Any) -> None:
    def is_alive() -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await server.drive_health(is_alive)
    assert await check(health) == NOT_SERVING


async def test_stopping_lets_running_calls_finish_and_refuses_new_ones(
    fake: FakeInference, server: RunningServer, stub: Stub
) -> None:
    call = stub.Generate(inference_pb2.GenerateRequest(model="hang"))
    await call.read()
    await server.stop(grace_s=0.05)
    assert fake.ended.get_nowait() == ("hang", "cancelled")
    with pytest.raises(grpc.aio.AioRpcError):
        await tokenize(stub)
    call.cancel()
    await server.stop()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_every_service_that_it_names(
    channel: grpc.aio.Channel, version: str
) -> None:
    """What grpcurl asks for: the services, then the file of each, with all that it imports."""
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    (answer,) = [response async for response in call]
    names = {service.name for service in answer.list_services_response.service}
    assert names == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    wanted = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in names]
    async for described in ask(iter(wanted)):
        pool = DescriptorPool()
        for data in reversed(described.file_descriptor_response.file_descriptor_proto):
            pool.AddSerializedFile(data)
        name = described.original_request.file_containing_symbol
        assert pool.FindServiceByName(name).methods
        names.remove(name)
    assert not names


async def test_handlers_of_every_kind_are_wrapped() -> None:
    async def fail(request: Any, context: Any) -> Any:  # noqa: ARG001
        raise InvalidRequest("refused", request_id="r-1")

    async def read_then_fail(request: Any, context: Any) -> Any:  # noqa: ARG001
        # grpc.aio's client loses the status of a call that ends before its request is sent.
        async for _ in request:
            pass
        raise InvalidRequest("refused", request_id="r-1")

    async def fail_late(request: Any, context: Any) -> Any:  # noqa: ARG001
        async for _ in request:
            yield b"one"
        raise InvalidRequest("refused", request_id="r-1")

    async def write_then_fail(request: Any, context: Any) -> Any:  # noqa: ARG001
        await context.write(b"one")
        raise InvalidRequest("refused", request_id="r-1")

    handlers = {
        "Uu": grpc.unary_unary_rpc_method_handler(fail),
        "Su": grpc.stream_unary_rpc_method_handler(read_then_fail),
        "Us": grpc.unary_stream_rpc_method_handler(write_then_fail),
        "Ss": grpc.stream_stream_rpc_method_handler(fail_late),
    }

    def register(server: grpc.aio.Server) -> tuple[str, ...]:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
        return ("t.T",)

    running = await start_server("127.0.0.1:0", register)
    try:
        async with aio_channel(running.address) as channel:
            calls = [
                channel.unary_unary("/t.T/Uu")(b"x"),
                channel.stream_unary("/t.T/Su")(iter([b"x"])),
                channel.unary_stream("/t.T/Us")(b"x"),
                channel.stream_stream("/t.T/Ss")(iter([b"x"])),
            ]
            for call in calls:
                if hasattr(call, "read"):
                    assert await call.read() == b"one"
                with pytest.raises(grpc.RpcError) as caught:
                    await (call.read() if hasattr(call, "read") else call)
                assert from_rpc_error(caught.value).message == "refused"
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await channel.unary_unary("/t.T/Nothing")(b"x")
            assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await running.stop()
