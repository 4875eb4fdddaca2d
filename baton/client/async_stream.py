"""One answer as it comes, for asyncio."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from baton.client import responses
from baton.client.results import Chunk, Completion
from baton.client.settings import (
    Attempts,
    Settings,
)
from baton.errors import BatonError, Cancelled
from baton.v1 import inference_pb2


class AsyncCompletionStream:
    """The pieces of one answer, as they come. An async iterator, and a context manager whose end
    cancels the request.

    Iterating raises the errors of baton.errors. A stream that is forgotten half-read is cancelled
    when it is collected, and one whose reading task is cancelled at once.
    """

    def __init__(
        self,
        start: Callable[[float], Any],
        settings: Settings,
        closed: asyncio.Event,
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

    async def collect(self) -> Completion:
        """Read to the end, and put together what this call read. Raises Cancelled if the stream is
        closed before."""
        chunks = [chunk async for chunk in self]
        if not self._reader.has_ended:
            raise Cancelled("the stream was closed before its end", request_id=self.request_id)
        return responses.completion_of(self.request_id, chunks)

    async def close(self) -> None:
        """Cancel the request unless it has ended. Iterating ends then. May be called again, and by
        any task."""
        self._end()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while not self._is_closed:
            try:
                response = await self._call.read()
            except asyncio.CancelledError:
                # Of the reading task; or of the call, by some task's `close`, which grpc tells in
                # the same way.
                self._end()
                if is_task_cancelled():
                    raise
            except grpc.RpcError as error:
                if not self._is_closed:
                    await self._retry(self._settings.error_of(error, self.request_id))
            else:
                if response is not grpc.aio.EOF:
                    return self._accept(response)
                self._end()
                self._reader.end()
        if self._client_closed.is_set() and not self._reader.has_ended:
            raise Cancelled("the client was closed", request_id=self.request_id)
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _open(self, timeout_s: float) -> None:
        # Read by read(): an unfinished aiter() keeps the call, and by it the connection, alive
        # until the next collection.
        self._call = self._start(timeout_s)
        self._cancel = weakref.finalize(self, self._call.cancel)
        # An event loop that is gone at exit has taken its calls with it.
        self._cancel.atexit = False

    def _end(self) -> None:
        self._is_closed = True
        self._cancel()

    def _accept(self, response: inference_pb2.GenerateResponse) -> Chunk:
        try:
            return self._reader.accept(response)
        except BatonError:
            self._end()
            raise

    async def _retry(self, error: BatonError) -> None:
        """Open the stream anew, or raise the error: after the first piece, it is always raised."""
        is_first = self._reader.num_chunks == 0
        delay_s = self._attempts.delay_s(error, time.monotonic()) if is_first else None
        if delay_s is None or await is_set_within(self._client_closed, delay_s):
            self._end()
            raise error
        if not self._is_closed:
            self._cancel.detach()
            self._open(self._attempts.remaining_s(time.monotonic()))


def is_task_cancelled() -> bool:
    """Whether the running task is asked to end, as opposed to a call of its being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event is set, now or before the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
