"""The client for threads, and one answer as it comes. Same methods as AsyncClient; what both do is
in requests, results and calls."""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from baton.client import requests, results
from baton.client.calls import (
    DEFAULT_ADDRESS,
    DEFAULT_MAX_RETRIES,
    DEFAULT_TIMEOUT_S,
    MAX_AT_ONCE,
    Connection,
    Connections,
    GenerateCalls,
    MetadataLike,
    Settings,
)
from baton.client.requests import PromptLike, StreamOptions
from baton.client.results import Chunk, Completion, Model, Tokenization
from baton.errors import BatonError
from baton.rpc.channel import CLIENT_KEEPALIVE_MS, sync_channel
from baton.rpc.tls import TlsFiles
from baton.sampling_params import SamplingOptions, SamplingParams
from baton.v1 import inference_pb2


class Client:
    """Connections to a Baton gateway, one for each hundred calls under way. Thread-safe; a context
    manager. Every method raises the errors of baton.errors.

    address: host:port of the gateway, or of several, separated by commas, that serve the same
    model: the next one is used when one fails. As a URL, too: http://host:port for plain text,
    https://host:port for TLS by the usual roots, or by `tls`.
    timeout_s: of each call that names none of its own, retries included.
    metadata: sent with every call.
    max_retries: how often in a row a call is tried again where it may succeed later, after the
    time the server asks for, or a second, and twice as long the next time. A stream of which
    pieces have come goes on behind them, and is tried five times in a row at least, unless this
    is 0.
    tls: files by which the two ends know each other; TlsFiles() trusts the usual roots. None for
    plain text.
    api_key: shown with every call; only ever together with tls where others can listen.
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
        self._connections = Connections(
            lambda address: sync_channel(
                address, self._settings.tls, keepalive_ms=CLIENT_KEEPALIVE_MS
            ),
            self._settings.addresses,
        )
        # The first one now: files that cannot be read are an error here.
        self._connections.give_back(self._connections.take())
        self._closed = threading.Event()

    @property
    def address(self) -> str:
        return self._settings.address

    def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        **options: Unpack[StreamOptions],
    ) -> Completion:
        """The whole answer to a prompt. Arguments as in `stream`."""
        with self.stream(prompt, params, **options) as stream:
            return stream.collect()

    def generate_all(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | None = None,
        **options: Unpack[StreamOptions],
    ) -> list[Completion]:
        """The whole answers to several prompts, in their order, as many at once as the server may
        be asked for. After the first error no more are begun, and it is raised. Arguments as in
        `stream`; a request_id is proposed with each prompt's index behind it."""

        def answer(index: int, prompt: PromptLike) -> Completion:
            return self.generate(prompt, params, **requests.options_of(options, index))

        with ThreadPoolExecutor(min(len(prompts), MAX_AT_ONCE) or 1) as pool:
            try:
                return list(pool.map(answer, range(len(prompts)), prompts))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        request_id: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> CompletionStream:
        """The answer to a prompt, piece by piece. The request is sent at once.

        prompt: text, token ids, or chat messages. params, sampling: how tokens are chosen; the
        latter win.
        model: empty for the only one served. priority: lower is sooner. cache_salt: who may share
        cached prefixes.
        add_special_tokens: False for a text that has the tokenizer's special tokens already, as one
        that a chat template wrote; none are ever added to token ids or messages.
        request_id: proposed to the server; drawn if empty. timeout_s: None for the client's.
        """
        request = requests.generate_request(
            prompt,
            (params or SamplingParams()).with_options(**sampling),
            model=model,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
        )
        calls = GenerateCalls(self._connections, self._settings, request, request_id, timeout_s)
        return CompletionStream(calls, self._closed)

    def tokenize(
        self,
        prompt: PromptLike,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> Tokenization:
        """The token ids of a prompt, chat messages rendered with the model's template.
        add_special_tokens: as in `stream`."""
        request = requests.tokenize_request(
            prompt, model=model, add_special_tokens=add_special_tokens
        )
        response = self._unary(lambda c: c.inference.Tokenize, request, timeout_s)
        return results.tokenization_of(response)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = requests.detokenize_request(
            token_ids, model=model, skip_special_tokens=skip_special_tokens
        )
        response = self._unary(lambda c: c.inference.Detokenize, request, timeout_s)
        return str(response.text)

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The models served, with their workers."""
        request = inference_pb2.ListModelsRequest()
        response = self._unary(lambda c: c.inference.ListModels, request, timeout_s)
        return results.models_of(response)

    def model(self, name: str = "", *, timeout_s: float | None = None) -> Model:
        """One model; empty for the only one served."""
        request = requests.get_model_request(model=name)
        response = self._unary(lambda c: c.inference.GetModel, request, timeout_s)
        return results.model_of(response.model)

    def health(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether the server, or one service of it by its full name, serves now."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = self._unary(lambda c: c.health.Check, request, timeout_s)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Cancel all that runs, and disconnect. May be called again."""
        self._closed.set()
        for channel in self._connections.close():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _unary(
        self,
        method_of: Callable[[Connection[grpc.Channel]], Any],
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
                return method_of(connection)(request, timeout=remaining_s, metadata=metadata)
            except grpc.RpcError as rpc_error:
                error = self._settings.error_of(rpc_error, request_id)
                delay_s = attempts.delay_s(error, time.monotonic())
                if delay_s is None or self._closed.wait(delay_s):
                    raise error from None
                self._connections.avoid(connection)
            finally:
                self._connections.give_back(connection)


class CompletionStream:
    """The pieces of one answer, as they come. An iterator, and a context manager whose end cancels
    the request.

    Iterating raises the errors of baton.errors. A stream that is forgotten half-read is cancelled
    when it is collected.
    """

    def __init__(self, calls: GenerateCalls[grpc.Channel], closed: threading.Event) -> None:
        """closed: whether the client is."""
        self._calls = calls
        self._client_closed = closed
        self._is_over = False
        self._is_closed = False
        self._open()

    @property
    def request_id(self) -> str:
        """As the server knows it, once the first piece has come; until then as this client proposed
        it."""
        return self._calls.request_id

    def collect(self) -> Completion:
        """Read to the end, and put together what this call read. Raises Cancelled if the stream is
        closed before."""
        return self._calls.completion(list(self))

    def close(self) -> None:
        """Cancel the request unless it has ended: whoever reads on, or waits for a piece, gets
        Cancelled. May be called again, and by any thread."""
        self._is_closed = True
        self._end()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while not self._is_over:
            try:
                response = next(self._call)
            except StopIteration:
                self._end()
                self._calls.end()
            except grpc.RpcError as error:
                if not self._is_over:
                    self._retry(self._calls.error_of(error))
            else:
                try:
                    chunk = self._calls.accept(response)
                except BatonError:
                    self._end()
                    raise
                if chunk is not None:
                    return chunk
        if self._is_closed or self._client_closed.is_set():
            self._calls.check_whole("client" if self._client_closed.is_set() else "stream")
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> None:
        self._call = self._calls.open()
        self._cancel = weakref.finalize(self, self._call.cancel)

    def _end(self) -> None:
        self._is_over = True
        self._cancel()

    def _retry(self, error: BatonError) -> None:
        """Open the stream anew, behind what came, or raise the error."""
        if self._calls.is_whole:
            self._end()
            self._calls.end()
            return
        delay_s = self._calls.retry_delay_s(error)
        if delay_s is None or self._client_closed.wait(delay_s):
            self._end()
            raise error
        if not self._is_over:
            self._cancel.detach()
            self._open()
