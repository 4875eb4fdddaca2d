"""The floors under a gateway: servers that answer with chunks like its own, of one text, and have
nothing but their protocol around them."""

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


class BareInference(inference_pb2_grpc.InferenceServiceServicer):
    """Of gRPC. token_ids: of each chunk."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)
        self._text: str = tokenizer.decode(list(token_ids))

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        for index in range(0, request.sampling.max_tokens, len(self._token_ids)):
            chunk = inference_pb2.GenerateResponse(
                request_id="bare", token_index=index, token_ids=self._token_ids, text=self._text
            )
            await context.write(chunk)


@asynccontextmanager
async def start_bare_sse(host: str, text: str, num_tokens: int) -> AsyncIterator[str]:
    """Of server-sent events, on asyncio's streams; its host:port. text: of each chunk, which is
    counted as num_tokens."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        asked = json.loads(await reader.readexactly(length))
        data = _HEAD
        for _ in range(0, asked["max_tokens"], num_tokens):
            writer.write(data + _chunked(f"data: {json.dumps(_event(text))}\n\n".encode()))
            data = b""
            await asyncio.sleep(0)  # each goes out by itself
            await writer.drain()
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
