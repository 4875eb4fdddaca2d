"""The asyncio client and its streams. sync_client runs the same code with a blocking channel and
event."""

from __future__ import annotations

import asyncio
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from baton.client import requests, results
from baton.client.calls import (
    DEFAULT_ADDRESS,
    DEFAULT_MAX_RETRIES,
    DEFAULT_TIMEOUT_S,
    MAX_AT_ONCE,
    Channel,
    Connection,
    Connections,
    GenerateCalls,
    MetadataLike,
    Settings,
)
from baton.client.requests import PromptLike, StreamOptions
from baton.client.results import Chunk, Completion, Model, Tokenization
from baton.errors import BatonError, Cancelled
from baton.rpc.channel import CLIENT_KEEPALIVE_MS, aio_channel
from baton.rpc.tls import TlsFiles
from baton.sampling_params import SamplingOptions, SamplingParams
from baton.v1 import inference_pb2


class ClosedEvent(Protocol):
    """Event that is set when a client is closed."""

    def set(self) -> object: ...

    def is_set(self) -> bool: ...

    async def is_set_within(self, timeout_s: float) -> bool:
        """Wait for the event up to a time limit. Returns whether it is set."""
        ...


class AsyncClient:
    """Client of a Baton gateway, for one event loop; an async context manager.

    Every method raises the errors of baton.errors. Arguments as of Client. It connects at the first
    call, which must run in the event loop, and opens another connection per hundred concurrent
    calls.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        metadata: MetadataLike = (),
        max_retries: int = DEFAULT_MAX_RETRIES,
        tls: TlsFiles | None = None,
        api_key: str | None = None,
    ) -> None:
        self._settings = Settings.of(address, timeout_s, metadata, max_retries, api_key, tls)
        self._closed = self._closed_event()
        self._connections = Connections(self._connect, self._settings.addresses)

    @property
    def address(self) -> str:
        return self._settings.address

    async def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        **options: Unpack[StreamOptions],
    ) -> Completion:
        """Generate a whole answer. Arguments as in `stream`."""
        async with self.stream(prompt, params, **options) as stream:
            return await stream.collect()

    async def generate_all(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | None = None,
        **options: Unpack[StreamOptions],
    ) -> list[Completion]:
        """Generate answers to several prompts, in their order, with at most MAX_AT_ONCE requests at
        a time. The first error cancels the others, and is raised. Arguments as in `stream`; a
        prompt's index is appended to request_id."""
        room = asyncio.Semaphore(MAX_AT_ONCE)

        async def answer(index: int, prompt: PromptLike) -> Completion:
            async with room:
                return await self.generate(prompt, params, **requests.options_of(options, index))

        tasks = [asyncio.create_task(answer(i, prompt)) for i, prompt in enumerate(prompts)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        priority: int = 0,
        cache_salt: str = "",
        slo_class: str = "",
        add_special_tokens: bool = True,
        return_receipt: bool = False,
        request_id: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncCompletionStream:
        """Stream the answer to a prompt. The request is sent at once.

        prompt: text, token ids, or chat messages. params, sampling: sampling parameters; the latter
        take precedence.
        model: empty for the only model served. priority: lower runs sooner. cache_salt: scope of
        prefix cache sharing. slo_class: one of the gateway's --slo-classes; empty for that of the
        API key, or none.
        add_special_tokens: False for a text that already has the tokenizer's special tokens, such
        as a rendered chat template; never added to token ids or messages.
        return_receipt: give the answer's receipt, for `baton check --receipt`.
        request_id: proposed to the server; random if empty. timeout_s: None for the client's.
        """
        request = requests.generate_request(
            prompt,
            (params or SamplingParams()).with_options(**sampling),
            model=model,
            priority=priority,
            cache_salt=cache_salt,
            slo_class=slo_class,
            add_special_tokens=add_special_tokens,
            return_receipt=return_receipt,
        )
        calls = GenerateCalls(self._connections, self._settings, request, request_id, timeout_s)
        return AsyncCompletionStream(calls, self._closed)

    async def tokenize(
        self,
        prompt: PromptLike,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> Tokenization:
        """Tokenize a prompt; chat messages are rendered with the model's template.
        add_special_tokens: as in `stream`."""
        request = requests.tokenize_request(
            prompt, model=model, add_special_tokens=add_special_tokens
        )
        response = await self._unary(lambda c: c.inference.Tokenize, request, timeout_s)
        return results.tokenization_of(response)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """Decode token ids to text."""
        request = requests.detokenize_request(
            token_ids, model=model, skip_special_tokens=skip_special_tokens
        )
        response = await self._unary(lambda c: c.inference.Detokenize, request, timeout_s)
        return str(response.text)

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """List the served models, with their workers."""
        request = inference_pb2.ListModelsRequest()
        response = await self._unary(lambda c: c.inference.ListModels, request, timeout_s)
        return results.models_of(response)

    async def model(self, name: str = "", *, timeout_s: float | None = None) -> Model:
        """Describe one model; empty for the only one served."""
        request = requests.get_model_request(model=name)
        response = await self._unary(lambda c: c.inference.GetModel, request, timeout_s)
        return results.model_of(response.model)

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether the server, or one of its services by full name, is serving."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = await self._unary(lambda c: c.health.Check, request, timeout_s)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Cancel all running calls and disconnect. Idempotent."""
        self._closed.set()
        for channel in self._connections.close():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _connect(self, address: str) -> Channel:
        return aio_channel(address, self._settings.tls, keepalive_ms=CLIENT_KEEPALIVE_MS)

    def _closed_event(self) -> ClosedEvent:
        return _AsyncioClosedEvent()

    async def _unary(
        self,
        method_of: Callable[[Connection], Any],
        request: Message,
        timeout_s: float | None,
    ) -> Any:
        request_id = uuid.uuid4().hex
        metadata = self._settings.call_metadata(request_id)
        attempts = self._settings.attempts(timeout_s)
        while True:
            connection = self._connections.take()
            try:
                remaining_s = attempts.remaining_s(time.monotonic())
                return await method_of(connection)(request, timeout=remaining_s, metadata=metadata)
            except asyncio.CancelledError:
                if _is_task_cancelled():
                    raise
                raise Cancelled("the client was closed", request_id=request_id) from None
            except grpc.RpcError as rpc_error:
                error = self._settings.error_of(rpc_error, request_id, attempts)
                delay_s = attempts.delay_s(error, time.monotonic())
                if delay_s is None or await self._closed.is_set_within(delay_s):
                    raise error from None
                self._connections.avoid(connection)
            finally:
                self._connections.give_back(connection)


class AsyncCompletionStream:
    """Stream of one answer: an async iterator, and a context manager that cancels the request on
    exit.

    Iterating raises the errors of baton.errors. The request is cancelled when its reading task is
    cancelled, or when an abandoned stream is garbage-collected.
    """

    def __init__(self, calls: GenerateCalls, closed: ClosedEvent) -> None:
        """closed: set when the client is closed."""
        self._calls = calls
        self._client_closed = closed
        self._is_over = False
        self._is_closed = False
        self._open()

    @property
    def request_id(self) -> str:
        """The server's request id once the first piece has arrived; before, the id proposed by this
        client."""
        return self._calls.request_id

    async def collect(self) -> Completion:
        """Read to the end, and join the pieces read by this call. Raises Cancelled if the stream is
        closed first."""
        return self._calls.completion([chunk async for chunk in self])

    async def close(self) -> None:
        """Cancel the request unless it has ended; concurrent and later reads raise Cancelled.
        Idempotent, callable from any task."""
        self._is_closed = True
        self._end()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while not self._is_over:
            try:
                response = await self._call.read()
            except asyncio.CancelledError:
                # Cancellation of the reading task, or of the call by `close` in another task; grpc
                # reports both alike.
                self._end()
                if _is_task_cancelled():
                    raise
            except grpc.RpcError as error:
                if not self._is_over:
                    await self._retry(self._calls.error_of(error))
            else:
                if response is grpc.aio.EOF:
                    self._end()
                    self._calls.end()
                    continue
                try:
                    chunk = self._calls.accept(response)
                except BatonError:
                    self._end()
                    raise
                if chunk is not None:
                    return chunk
        if self._is_closed or self._client_closed.is_set():
            self._calls.check_whole("client" if self._client_closed.is_set() else "stream")
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _open(self) -> None:
        # Read with read(): an unfinished aiter() keeps the call and its connection alive until
        # garbage collection.
        self._call = self._calls.open()
        self._cancel = weakref.finalize(self, self._call.cancel)
        # At exit, the event loop is gone, and its calls with it.
        self._cancel.atexit = not isinstance(self._call, grpc.aio.Call)

    def _end(self) -> None:
        self._is_over = True
        self._cancel()

    async def _retry(self, error: BatonError) -> None:
        """Reopen the stream after the last piece, or raise the error."""
        if self._calls.is_whole:
            self._end()
            self._calls.end()
            return
        delay_s = self._calls.retry_delay_s(error)
        if delay_s is None or await self._client_closed.is_set_within(delay_s):
            self._end()
            raise error
        if not self._is_over:
            self._cancel.detach()
            self._open()


def _is_task_cancelled() -> bool:
    """Whether the running task is being cancelled, as opposed to one of its calls."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _AsyncioClosedEvent(asyncio.Event):
    async def is_set_within(self, timeout_s: float) -> bool:
        """See ClosedEvent."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wait()
        return self.is_set()
