"""One answer as it comes, for threads."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from baton.client import responses
from baton.client.results import Chunk, Completion
from baton.client.settings import (
    Attempts,
    Settings,
)
from baton.errors import BatonError, Cancelled
from baton.v1 import inference_pb2


class CompletionStream:
    """The pieces of one answer, as they come. An iterator, and a context manager whose end cancels
    the request.

    Iterating raises the errors of baton.errors. A stream that is forgotten half-read is cancelled
    when it is collected.
    """

    def __init__(
        self,
        start: Callable[[float], Any],
        settings: Settings,
        closed: threading.Event,
        request_id: str,
        timeout_s: float,
    ) -> None:
        self._start = start
        self._settings = settings
        self._client_closed = closed
        self._attempts = Attempts(settings.max_retries, time.monotonic() + timeout_s)
        self._reader = responses.StreamReader(request_id)
        self._is_closed = False
        self._open(timeout_s)

    @property
    def request_id(self) -> str:
        """As the server knows it, once the first piece has come; until then as this client proposed
        it."""
        return self._reader.request_id

    def collect(self) -> Completion:
        """Read to the end, and put together what this call read. Raises Cancelled if the stream is
        closed before."""
        chunks = list(self)
        if not self._reader.has_ended:
            raise Cancelled("the stream was closed before its end", request_id=self.request_id)
        return responses.completion_of(self.request_id, chunks)

    def close(self) -> None:
        """Cancel the request unless it has ended. Iterating ends then. May be called again, and by
        any thread."""
        self._is_closed = True
        self._cancel()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while not self._is_closed:
            try:
                response = next(self._call)
            except StopIteration:
                self.close()
                self._reader.end()
            except grpc.RpcError as error:
                if not self._is_closed:
                    self._retry(self._settings.error_of(error, self.request_id))
            else:
                return self._accept(response)
        if self._client_closed.is_set() and not self._reader.has_ended:
            raise Cancelled("the client was closed", request_id=self.request_id)
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, timeout_s: float) -> None:
        self._call = self._start(timeout_s)
        self._cancel = weakref.finalize(self, self._call.cancel)

    def _accept(self, response: inference_pb2.GenerateResponse) -> Chunk:
        try:
            return self._reader.accept(response)
        except BatonError:
            self.close()
            raise

    def _retry(self, error: BatonError) -> None:
        """Open the stream anew, or raise the error: after the first piece, it is always raised."""
        is_first = self._reader.num_chunks == 0
        delay_s = self._attempts.delay_s(error, time.monotonic()) if is_first else None
        if delay_s is None or self._client_closed.wait(delay_s):
            self.close()
            raise error
        if not self._is_closed:
            self._cancel.detach()
            self._open(self._attempts.remaining_s(time.monotonic()))
