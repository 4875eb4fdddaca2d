"""Cost of the gateway: tokens of a source that computes nothing, through its process, to raw gRPC
or server-sent event streams."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import grpc.aio

from baton.config import ServeOptions
from baton.rpc.channel import aio_channel
from baton.supervisor import Cluster
from baton.supervisor.plan import PROGRAMS, Programs
from baton.types import KvSource, Sampling, SequenceSpec
from baton.v1 import inference_pb2, sequence_service_pb2, sequence_service_pb2_grpc
from baton.wire import sequence_to_proto
from bench.threads import cpu_seconds, pin

_GENERATE = "/baton.v1.InferenceService/Generate"
_PROMPT = (17, 18, 19, 20)
_DEADLINE_S = 300.0

#: Maximum chunks per stream of the bare server; enough to measure the cost of one.
_NUM_BARE_CHUNKS = 1000

#: Tokens of each answer in measurements of time to first token.
_NUM_TTFT_TOKENS = 2

#: Protocol of the clients.
Door = Literal["grpc", "http"]

#: Reads an answer with this number of tokens; returns its number of chunks.
_Read = Callable[[int], Awaitable[int]]

SOURCE = (sys.executable, "-m", "bench.token_source")


@dataclass(frozen=True, slots=True)
class Flow:
    """Output of the source, per stream. step_tokens: per step. step_ms: between steps, independent
    of slow readers; 0: each step starts when the previous one was read."""

    num_streams: int
    num_tokens: int
    step_tokens: int
    step_ms: float

    @property
    def offered_per_s(self) -> float | None:
        """Tokens per second of all streams; None if the readers determine the rate."""
        return self.num_streams * self.step_tokens / self.step_ms * 1e3 if self.step_ms else None


@dataclass(frozen=True, slots=True)
class GatewayCosts:
    """tokens_per_core_s: per CPU second of all threads of the gateway, nearly independent of other
    load. chunk_tokens: mean, as received by clients. chunk_cpu_us: of the gateway, per chunk.
    bare_cpu_us: of a server that only writes the chunks of each step, at the same pace, in the same
    run."""

    flow: Flow
    tokens_per_s: float
    tokens_per_core_s: float
    chunk_tokens: float
    chunk_cpu_us: float
    bare_cpu_us: float


@dataclass(frozen=True, slots=True)
class AddedTtft:
    """Median milliseconds of single requests to the first token, at the gateway and directly at the
    source. A second token follows one step later, so that the first one does not end the stream.

    bare_ms: to the first chunk of a bare server with the same protocol. cpu_ms: CPU of the gateway
    for a whole request; the most reliable figure on a busy machine, where each wake-up waits for a
    core.
    """

    gateway_ms: float
    source_ms: float
    bare_ms: float
    cpu_ms: float

    @property
    def added_ms(self) -> float:
        """Difference from a sequence opened directly at the source."""
        return self.gateway_ms - self.source_ms

    @property
    def beside_bare_ms(self) -> float:
        """Difference from the bare server: all work of the gateway, including its connection to the
        source."""
        return self.gateway_ms - self.bare_ms


def _options(model: str, flow: Flow) -> ServeOptions:
    return ServeOptions.model_validate(
        {
            "model": model,
            "engine": "oracle",
            "oracle_step_ms": flow.step_ms,
            "num_speculative_tokens": flow.step_tokens,
            "colocated": True,
            "num_decode_workers": 1,
            "max_num_seqs": 2 * flow.num_streams,
            "port": 0,
            "log_level": "error",
        }
    )


@asynccontextmanager
async def gateway_before_source(
    model: str, flow: Flow
) -> AsyncIterator[tuple[Cluster, grpc.aio.Channel]]:
    """Start a gateway and a token source behind it."""
    programs = Programs(PROGRAMS.prefill, SOURCE, PROGRAMS.gateway)
    async with (
        Cluster(_options(model, flow), programs=programs) as cluster,
        aio_channel(cluster.address) as channel,
    ):
        yield cluster, channel


async def measure_flow(model: str, flow: Flow, door: Door = "grpc") -> GatewayCosts:
    """Run all streams at once, from the first request to the last token."""
    async with gateway_before_source(model, flow) as (cluster, channel):
        read = _reader(channel) if door == "grpc" else _sse_reader(cluster.http_address)
        gateway, source = cluster.pid_of("gateway"), cluster.pid_of("decode-0")
        first, *others = sorted(os.sched_getaffinity(0))
        if others:
            pin(gateway, {first})
            pin(source, set(others))
        num_chunks, seconds, cpu_s = await _run_streams(read, flow, gateway)
        if others:
            pin(source, {first})
        async with aio_channel(cluster.address_of("decode-0")) as bare:
            num_tokens = min(flow.num_tokens, _NUM_BARE_CHUNKS * flow.step_tokens)
            bare_flow = replace(flow, num_tokens=num_tokens)
            address = cluster.report_of("decode-0").http_address
            read = _reader(bare) if door == "grpc" else _sse_reader(address)
            num_bare, _, bare_cpu_s = await _run_streams(read, bare_flow, source)
    num_tokens = flow.num_streams * flow.num_tokens
    return GatewayCosts(
        flow=flow,
        tokens_per_s=num_tokens / seconds,
        tokens_per_core_s=num_tokens / cpu_s,
        chunk_tokens=num_tokens / num_chunks,
        chunk_cpu_us=cpu_s / num_chunks * 1e6,
        bare_cpu_us=bare_cpu_s / num_bare * 1e6,
    )


async def _run_streams(read: _Read, flow: Flow, pid: int) -> tuple[int, float, float]:
    """Run all streams at once; returns chunks, seconds, and CPU seconds of the serving process."""
    await read(flow.step_tokens)
    cpu_s, begin_s = cpu_seconds(pid), time.monotonic()
    streams = [read(flow.num_tokens) for _ in range(flow.num_streams)]
    num_chunks = sum(await asyncio.gather(*streams))
    seconds, cpu_s = time.monotonic() - begin_s, cpu_seconds(pid) - cpu_s
    return num_chunks, seconds, cpu_s


async def measure_added_ttft(model: str, num_requests: int, door: Door = "grpc") -> AddedTtft:
    """Measure gateway, source and bare server in turns, so that disturbances affect all."""
    async with gateway_before_source(model, Flow(1, _NUM_TTFT_TOKENS, 1, 5.0)) as (
        cluster,
        channel,
    ):
        through: list[float] = []
        direct: list[float] = []
        bare: list[float] = []
        async with aio_channel(cluster.address_of("decode-0")) as source:
            address = cluster.http_address
            bare_address = cluster.report_of("decode-0").http_address
            await (_reader(channel) if door == "grpc" else _sse_reader(address))(_NUM_TTFT_TOKENS)
            pid = cluster.pid_of("gateway")
            cpu_s = cpu_seconds(pid)
            call = sequence_service_pb2_grpc.SequenceServiceStub(source).Serve()
            for handle in range(1, num_requests + 1):
                begin_s = time.perf_counter()
                await call.write(_opening(handle))
                num_tokens = await _read_tokens(call)
                direct.append(time.perf_counter() - begin_s)
                while num_tokens < _NUM_TTFT_TOKENS:
                    num_tokens += await _read_tokens(call)
                if door == "grpc":
                    through.append(await _first_token_s(channel))
                    bare.append(await _first_token_s(source))
                else:
                    through.append(await _first_event_s(address))
                    bare.append(await _first_event_s(bare_address))
            call.cancel()
            cpu_s = cpu_seconds(pid) - cpu_s
    gateway_ms, source_ms, bare_ms = (median(times) * 1e3 for times in (through, direct, bare))
    return AddedTtft(gateway_ms, source_ms, bare_ms, cpu_s / num_requests * 1e3)


async def _read_tokens(call: Any) -> int:
    """Number of tokens in the next message with any; on a busy machine that may be all of them."""
    while (response := await call.read()) is not grpc.aio.EOF:
        if num_tokens := len(response.tokens.token_ids):
            return num_tokens
    raise RuntimeError("the token source ended its stream")


def _opening(handle: int) -> sequence_service_pb2.ServeRequest:
    spec = SequenceSpec(f"r{handle}", _PROMPT, Sampling(max_tokens=_NUM_TTFT_TOKENS))
    opening = sequence_service_pb2.OpenSequence(
        handle=handle,
        sequence=sequence_to_proto(spec),
        source=sequence_service_pb2.KvSource.ValueType(KvSource.LOCAL),
    )
    return sequence_service_pb2.ServeRequest(open=opening)


async def _first_token_s(channel: grpc.aio.Channel) -> float:
    """Seconds from the call to the first chunk of an answer; reads it to its end."""
    begin_s = time.perf_counter()
    call = _generate(channel, _NUM_TTFT_TOKENS)
    await call.read()
    first_s = time.perf_counter() - begin_s
    while await call.read() is not grpc.aio.EOF:
        pass
    return first_s


async def _first_event_s(address: str) -> float:
    """Seconds from connecting to the first event of an answer; reads it to its end."""
    begin_s = time.perf_counter()
    async with open_post(address, _NUM_TTFT_TOKENS) as reader:
        await reader.readuntil(b"data: ")
        first_s = time.perf_counter() - begin_s
        await reader.read()
    return first_s


def _reader(channel: grpc.aio.Channel) -> _Read:
    return functools.partial(_read_stream, channel)


def _sse_reader(address: str) -> _Read:
    async def read(num_tokens: int) -> int:
        return await read_events(open_post(address, num_tokens))

    return read


async def read_events(answer: AbstractAsyncContextManager[asyncio.StreamReader]) -> int:
    """Number of chunks of one answer."""
    async with answer as reader:
        data = await reader.read()
    if not data.endswith(b"\r\n0\r\n\r\n") or b"data: [DONE]\n\n" not in data[-40:]:
        raise RuntimeError(f"the stream broke: {data[-200:]!r}")
    return data.count(b"data: {")


@asynccontextmanager
async def open_post(
    address: str, num_tokens: int, limit: int = 2**26
) -> AsyncIterator[asyncio.StreamReader]:
    """Answer to a completion on a new connection, as raw bytes. limit: read-ahead buffer, in
    bytes."""
    fields = {"prompt": _PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(fields)
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    head = f"host: {address}\r\nconnection: close\r\ncontent-length: {len(body)}"
    try:
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


async def _read_stream(channel: grpc.aio.Channel, num_tokens: int) -> int:
    """Number of chunks of one answer."""
    call = _generate(channel, num_tokens)
    num_chunks = 0
    while await call.read() is not grpc.aio.EOF:
        num_chunks += 1
    return num_chunks


def _generate(channel: grpc.aio.Channel, num_tokens: int) -> Any:
    """A call with undecoded responses, to exclude the client's decoding cost."""
    request = inference_pb2.GenerateRequest()
    request.prompt.token_ids.ids.extend(_PROMPT)
    request.sampling.max_tokens = num_tokens
    request.sampling.ignore_eos = True
    generate: grpc.aio.UnaryStreamMultiCallable[Any, Any] = channel.unary_stream(
        _GENERATE, request_serializer=inference_pb2.GenerateRequest.SerializeToString
    )
    return generate(request, timeout=_DEADLINE_S)
