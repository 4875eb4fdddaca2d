"""Lower bounds for a gateway: servers that write the same chunks at the same pace, with only their
protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tokenizers import Tokenizer

from baton.v1 import inference_pb2, inference_pb2_grpc

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"connection: close\r\n\r\n"
)


class Steps:
    """Steps of an engine: all streams write a chunk at the end of one, and nothing until the next.
    Chunks written without pauses would use CPU caches differently.

    step_s: seconds from one end to the next; 0: only yield to other tasks.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._end_s = 0.0
        """End of the last step waited for, in event loop time."""
        self._has_ended: asyncio.Event | None = None
        """Event of the step waited for."""

    async def next(self) -> None:
        """Wait for the end of the current step."""
        if self._has_ended is None:
            loop = asyncio.get_running_loop()
            self._has_ended = asyncio.Event()
            self._end_s = max(self._end_s + self._step_s, loop.time())
            loop.call_at(self._end_s, self._end)
        await self._has_ended.wait()

    def _end(self) -> None:
        if self._has_ended is not None:
            self._has_ended.set()
            self._has_ended = None


class BareInference(inference_pb2_grpc.InferenceServiceServicer):
    """The gRPC server. token_ids: of each chunk."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int], steps: Steps) -> None:
        self._steps = steps
        self._token_ids = tuple(token_ids)
        self._text: str = tokenizer.decode(list(token_ids))

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        for index in range(0, request.sampling.max_tokens, len(self._token_ids)):
            chunk = inference_pb2.GenerateResponse(
                request_id="bare", token_index=index, token_ids=self._token_ids, text=self._text
            )
            await context.write(chunk)
            await self._steps.next()


@asynccontextmanager
async def start_bare_sse(host: str, text: str, num_tokens: int, steps: Steps) -> AsyncIterator[str]:
    """Start the server-sent events server, on asyncio streams; yields its host:port. text: of each
    chunk, counted as num_tokens."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        asked = json.loads(await reader.readexactly(length))
        data = _HEAD
        for _ in range(0, asked["max_tokens"], num_tokens):
            writer.write(data + _chunked(f"data: {json.dumps(_event(text))}\n\n".encode()))
            data = b""
            await writer.drain()
            await steps.next()
        writer.write(_chunked(b"data: [DONE]\n\n") + _chunked(b""))
        writer.close()

    server = await asyncio.start_server(answer, host, 0)
    async with server:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"


def _event(text: str) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return {"id": "bare", "object": "text_completion", "created": 0, "choices": [choice]}


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
