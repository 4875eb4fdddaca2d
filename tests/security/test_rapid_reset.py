"""HTTP/2 rapid reset: who opens streams and resets them without end harms nobody else."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import closing, suppress

import pytest

from baton.client import AsyncClient
from baton.errors import BatonError, WorkerLost
from baton.rpc.channel import MAX_CONCURRENT_STREAMS, aio_channel
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.support.fake_inference import SERVICE, FakeInference, serve
from tests.support.http2 import (
    ACK,
    CANCEL,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    header_block,
)

#: Streams that the attacker opens and resets, and calls of others that run meanwhile.
NUM_RESETS, NUM_OTHERS = 5_000, 40


async def reset_rapidly(port: int) -> None:
    """Returns when the server has taken it all, or closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.create_task(reader.read())
    writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
    headers, reset = header_block(f"/{SERVICE}/Generate"), struct.pack(">I", CANCEL)
    try:
        for stream in range(1, 2 * NUM_RESETS, 2):
            writer.write(frame(HEADERS, END_HEADERS, stream, headers))
            writer.write(frame(RST_STREAM, 0, stream, reset))
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeInference, int]]:
    made = FakeInference()
    running = await serve(made)
    yield made, running.port
    await running.stop()


@pytest.mark.slow
async def test_the_calls_of_others_are_answered(fake: tuple[FakeInference, int]) -> None:
    _, port = fake
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        await client.models()
        attack = asyncio.create_task(reset_rapidly(port))
        lost: list[BatonError] = []
        while not attack.done():
            prompts = [client.tokenize([number]) for number in range(NUM_OTHERS)]
            answers = await asyncio.gather(*prompts, return_exceptions=True)
            lost += [answer for answer in answers if isinstance(answer, BatonError)]
        await attack
        assert lost == []


async def test_more_calls_than_a_connection_takes_have_further_ones(
    fake: tuple[FakeInference, int],
) -> None:
    made, port = fake
    num = 2 * MAX_CONCURRENT_STREAMS + 1
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        streams = [client.stream([1], model="hang") for _ in range(num)]
        # All of them are answered: none waits for another's end.
        for stream in streams:
            assert (await anext(stream)).token_ids == (1,)
        assert len(client._connections._connections) == 3
        for stream in streams:
            await stream.close()
        # They are used again, and no further one is opened.
        assert await client.models()
        assert len(client._connections._connections) == 3
    assert len(made.requests) == num + 1


@pytest.mark.slow
async def test_calls_beyond_what_a_connection_takes_wait_their_turn(
    fake: tuple[FakeInference, int],
) -> None:
    """As of any client of gRPC, which opens one connection, and here tries nothing twice."""
    made, port = fake
    async with aio_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def call() -> None:
            async for _ in stub.Generate(inference_pb2.GenerateRequest()):
                pass

        num = 2 * MAX_CONCURRENT_STREAMS
        for _ in range(10):
            await asyncio.gather(*(call() for _ in range(num)))
    assert len(made.requests) == 10 * num


@pytest.mark.slow
async def test_a_cancel_that_nobody_asked_for_may_be_tried_again() -> None:
    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A server that resets every call, until its client leaves."""
        with suppress(asyncio.IncompleteReadError, ConnectionError), closing(writer):
            await reader.readexactly(len(PREFACE))
            writer.write(frame(SETTINGS, 0, 0, b""))
            while True:
                head = await reader.readexactly(9)
                kind, is_answer = head[3], head[4]
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if kind in (SETTINGS, PING) and not is_answer:
                    writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
                elif kind == HEADERS:
                    stream = int.from_bytes(head[5:], "big")
                    writer.write(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))

    server = await asyncio.start_server(drop, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with AsyncClient(f"127.0.0.1:{port}", max_retries=1) as client:
        with pytest.raises(WorkerLost, match="was lost"):
            await client.models()
        with pytest.raises(WorkerLost, match="was lost"):
            await client.generate([1])
    server.close()
    await server.wait_closed()
