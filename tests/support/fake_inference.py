"""An InferenceService without a model; a request's `model` field chooses its behaviour. Also a
program that serves it.

"" answers with the prompt's token ids (or the code points of its text), one a piece; "hang" sends
one piece and waits for ever; "silent" waits without one; "flood" never stops sending; "gap",
"double", "cut", "onwards" break the stream's rules; "crash" raises an unexpected exception after
one piece; "big" answers with more than a client takes.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from baton.errors import BatonError
from baton.rpc.server import RunningServer, start_server
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

SERVICE = "baton.v1.InferenceService"
SECRET = "the user's own text"

_STOP = sampling_pb2.FINISH_REASON_STOP
_MODEL = inference_pb2.Model(
    name="fake",
    max_model_len=4096,
    vocab_size=99,
    has_chat_template=True,
    workers=[
        inference_pb2.WorkerStatus(worker_id="d0", address="h:1", tier="decode", num_free_blocks=7)
    ],
)


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    """What happened is read from `requests`, `metadata` and `ended`; `failures` are raised by the
    next calls."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.failures: deque[BatonError] = deque()
        self.failures_after_first: deque[BatonError] = deque()
        #: The model of each call that arrived. Safe to read from any thread, as `ended` is.
        self.started: queue.Queue[str] = queue.Queue()
        #: How each Generate ended, by model: "done", "failed" or "cancelled".
        self.ended: queue.Queue[tuple[str, str]] = queue.Queue()

    def _note(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.started.put(getattr(request, "model", ""))
        self.metadata.append(dict(context.invocation_metadata()))
        if self.failures:
            raise self.failures.popleft()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        how = "failed"
        try:
            self._note(request, context)
            async for piece in self._pieces(request):
                yield piece
                if self.failures_after_first:
                    raise self.failures_after_first.popleft()
            how = "done"
        except (asyncio.CancelledError, GeneratorExit):
            how = "cancelled"
            raise
        finally:
            self.ended.put((request.model, how))

    async def _pieces(self, request: Any) -> AsyncIterator[Any]:
        first = inference_pb2.GenerateResponse(request_id="server-1", token_ids=[1], text="a")
        last = inference_pb2.GenerateResponse(token_index=1, token_ids=[2], finish_reason=_STOP)
        match request.model:
            case "hang":
                yield first
                await asyncio.Event().wait()
            case "silent":
                await asyncio.Event().wait()
            case "flood":
                for position in itertools.count():
                    yield inference_pb2.GenerateResponse(token_index=position, token_ids=[1])
            case "gap":
                yield first
                yield inference_pb2.GenerateResponse(token_index=2, token_ids=[2])
            case "double":
                yield first
                yield first
            case "cut":
                yield first
            case "onwards":
                yield first
                yield last
                yield inference_pb2.GenerateResponse(token_index=2, token_ids=[2])
            case "crash":
                yield first
                raise KeyError(SECRET)
            case "big":
                yield inference_pb2.GenerateResponse(text="x" * (17 * 2**20))
            case _:
                made = whole_choices if comes_at_end(request.sampling) else echo
                for piece in made(request):
                    yield piece

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request, context)
        if request.model == "crash":
            raise KeyError(SECRET)
        if request.model == "silent":
            await asyncio.Event().wait()
        return inference_pb2.TokenizeResponse(token_ids=prompt_ids(request), max_model_len=4096)

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request, context)
        return inference_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request, context)
        return inference_pb2.ListModelsResponse(models=[_MODEL])

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(request, context)
        return inference_pb2.GetModelResponse(model=_MODEL)


def prompt_ids(request: Any) -> list[int]:
    prompt = request.prompt
    if prompt.WhichOneof("kind") == "token_ids":
        return list(prompt.token_ids.ids)
    text = prompt.text + "".join(m.role + m.content for m in prompt.chat.messages)
    return [ord(character) for character in text]


def echo(request: Any) -> list[Any]:
    """One piece per token and choice, the choices taking turns, and a last piece without tokens for
    each; without those that the client has."""
    ids, num_choices = prompt_ids(request), request.sampling.n or 1
    pieces = [
        inference_pb2.GenerateResponse(
            request_id="server-1",
            choice=choice,
            token_index=position,
            token_ids=[token_id],
            text=chr(token_id) if token_id < 0x110000 else "",
            logprobs=[
                sampling_pb2.PositionLogprobs(
                    chosen=sampling_pb2.TokenLogprob(token_id=token_id, logprob=-0.5)
                )
            ],
        )
        for position, token_id in enumerate(ids)
        for choice in range(num_choices)
    ]
    pieces += [
        inference_pb2.GenerateResponse(
            request_id="server-1",
            choice=choice,
            token_index=len(ids),
            finish_reason=_STOP,
            stop_cause=inference_pb2.StopCause(stop="END"),
        )
        for choice in range(num_choices)
    ]
    pieces[-1].usage.prompt_tokens = len(ids)
    pieces[-1].usage.completion_tokens = len(ids) * num_choices
    pieces[-1].timing.decode_worker = "d0"
    nums = {entry.choice: len(entry.token_ids) for entry in request.resume_from}
    return [piece for piece in pieces if piece.token_index >= nums.get(piece.choice, 0)]


def comes_at_end(sampling: Any) -> bool:
    """Whether no choice is sent before all have ended."""
    return sampling.HasField("beam_search") or sampling.best_of > max(1, sampling.n)


def whole_choices(request: Any) -> list[Any]:
    """One piece for each choice: the prompt's tokens and the choice's number."""
    ids, num_choices = prompt_ids(request), request.sampling.n or 1
    pieces = [
        inference_pb2.GenerateResponse(
            request_id="server-1",
            choice=choice,
            token_ids=[*ids, ord(str(choice))],
            text="".join(map(chr, ids)) + str(choice),
            finish_reason=_STOP,
        )
        for choice in range(num_choices)
    ]
    pieces[-1].usage.completion_tokens = num_choices * (len(ids) + 1)
    return pieces


async def serve(fake: FakeInference) -> RunningServer:
    def register(server: grpc.aio.Server) -> list[str]:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
        return [SERVICE]

    return await start_server("127.0.0.1:0", register)


class FakeInThread:
    """The service in an event loop of its own, for synchronous tests; a context manager."""

    def __init__(self) -> None:
        self.fake = FakeInference()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> FakeInThread:
        self._thread.start()
        self._is_ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await serve(self.fake)
        self.address = server.address
        self._is_ready.set()
        await self._stop.wait()
        await server.stop()


async def _main() -> None:
    """Serve until stdin ends; the first line of stdout is the address."""
    server = await serve(FakeInference())
    print(server.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


if __name__ == "__main__":
    asyncio.run(_main())
