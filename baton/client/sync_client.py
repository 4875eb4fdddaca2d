"""The client for threads and its streams. Runs AsyncClient's coroutines to completion in the
calling thread, without an event loop: its channels block instead of suspending, so the coroutines
never await."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

import grpc
import grpc.aio

from baton.client import requests
from baton.client.async_client import AsyncClient, AsyncCompletionStream, ClosedEvent
from baton.client.calls import (
    DEFAULT_ADDRESS,
    DEFAULT_MAX_RETRIES,
    DEFAULT_TIMEOUT_S,
    MAX_AT_ONCE,
    Channel,
    MetadataLike,
)
from baton.client.requests import PromptLike, StreamOptions
from baton.client.results import Chunk, Completion
from baton.rpc.channel import CLIENT_KEEPALIVE_MS, sync_channel
from baton.rpc.tls import TlsFiles
from baton.sampling_params import SamplingParams

P = ParamSpec("P")
T = TypeVar("T")
AsyncT = TypeVar("AsyncT")


class _Blocking(Generic[AsyncT]):
    """Base of wrappers around `_twin`, an async object with blocking calls."""

    _twin: AsyncT


def _result(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that makes blocking calls only."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine over blocking calls waits for an event loop")


def _blocking(
    method: Callable[Concatenate[AsyncT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Blocking[AsyncT], P], T]:
    """A method that runs `method` of the twin."""

    @wraps(method)
    def run(self: _Blocking[AsyncT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _result(method(self._twin, *args, **kwargs))

    return run


def _opening(
    method: Callable[Concatenate[AsyncClient, P], AsyncCompletionStream],
) -> Callable[Concatenate[Client, P], CompletionStream]:
    @wraps(method)
    def run(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> CompletionStream:
        return CompletionStream(method(self._twin, *args, **kwargs))

    signature = inspect.signature(method).replace(return_annotation="CompletionStream")
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


class Client(_Blocking[AsyncClient]):
    """Client of a Baton gateway, one connection per hundred concurrent calls. Thread-safe; a
    context manager. Every method raises the errors of baton.errors.

    address: host:port of the gateway, or of several interchangeable ones, separated by commas; the
    next is used when one fails. Also a URL: http://host:port for plain text, https://host:port for
    TLS with the usual roots, or with `tls`.
    timeout_s: default per call, retries included.
    metadata: sent with every call.
    max_retries: consecutive retries of a call that may succeed later, after the server's retry time
    or one second, doubled for each retry. A stream that has received pieces resumes after them,
    with at least five consecutive retries, unless this is 0.
    tls: certificate files; TlsFiles() trusts the usual roots. None for plain text.
    api_key: sent with every call; use only with tls where others can listen.
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
        self._twin = _BlockingClient(
            address,
            timeout_s=timeout_s,
            metadata=metadata,
            max_retries=max_retries,
            tls=tls,
            api_key=api_key,
        )

    @property
    def address(self) -> str:
        return self._twin.address

    def generate_all(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | None = None,
        **options: Unpack[StreamOptions],
    ) -> list[Completion]:
        """Generate answers to several prompts, in their order, with at most MAX_AT_ONCE requests at
        a time. After the first error no more are started, and it is raised. Arguments as in
        `stream`; a prompt's index is appended to request_id."""

        def answer(index: int, prompt: PromptLike) -> Completion:
            return self.generate(prompt, params, **requests.options_of(options, index))

        with ThreadPoolExecutor(min(len(prompts), MAX_AT_ONCE) or 1) as pool:
            try:
                return list(pool.map(answer, range(len(prompts)), prompts))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    stream = _opening(AsyncClient.stream)
    generate = _blocking(AsyncClient.generate)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    models = _blocking(AsyncClient.models)
    model = _blocking(AsyncClient.model)
    health = _blocking(AsyncClient.health)
    close = _blocking(AsyncClient.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class CompletionStream(_Blocking[AsyncCompletionStream]):
    """Stream of one answer: an iterator, and a context manager that cancels the request on exit.
    Any thread may close it.

    Iterating raises the errors of baton.errors. An abandoned stream is cancelled when
    garbage-collected.
    """

    def __init__(self, twin: AsyncCompletionStream) -> None:
        self._twin = twin

    @property
    def request_id(self) -> str:
        """The server's request id once the first piece has arrived; before, the id proposed by this
        client."""
        return self._twin.request_id

    collect = _blocking(AsyncCompletionStream.collect)
    close = _blocking(AsyncCompletionStream.close)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        try:
            return _result(self._twin.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _BlockingClient(AsyncClient):
    """Client with coroutines that never suspend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Connect now, to report unreadable files here.
        self._connections.give_back(self._connections.take())

    def _connect(self, address: str) -> Channel:
        tls = self._settings.tls
        return _BlockingChannel(sync_channel(address, tls, keepalive_ms=CLIENT_KEEPALIVE_MS))

    def _closed_event(self) -> ClosedEvent:
        return _ThreadingClosedEvent()


class _ThreadingClosedEvent(threading.Event):
    async def is_set_within(self, timeout_s: float) -> bool:
        """See ClosedEvent."""
        return self.wait(timeout_s)


class _BlockingChannel:
    """A channel for any thread, with the methods of grpc.aio.Channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
        method: Any = self._channel.unary_unary(*args, **kwargs)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return call

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., _BlockingCall]:
        method: Any = self._channel.unary_stream(*args, **kwargs)
        return lambda *args, **kwargs: _BlockingCall(method(*args, **kwargs))

    async def close(self) -> None:
        self._channel.close()


class _BlockingCall:
    """A streaming call, with the methods of grpc.aio.UnaryStreamCall."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cancel: Callable[[], object] = call.cancel
        self.add_done_callback: Callable[[Callable[[object], None]], None] = call.add_done_callback

    async def read(self) -> Any:
        return next(self._call, grpc.aio.EOF)
