"""Writes the pieces of a request's outputs to its client, one at a time, within time limits: the
request's deadline, and how long its client may take for a piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from baton.errors import BatonError, ClientStalled, EngineFault
from baton.telemetry.names import RequestEvent
from baton.types import FinishReason, TokenLogprobs
from baton.v1 import inference_pb2, sampling_pb2
from baton.wire import logprobs_to_proto
from gateway.intake.request import ValidatedRequest
from gateway.output.output import Piece
from gateway.telemetry.timing import Timeline

#: Sends one chunk. None: the client's window took it; else what to await until it has. Never called
#: again before that. A client that keeps up costs no coroutine, of which a chunk made four.
Write = Callable[[inference_pb2.GenerateResponse], Awaitable[object] | None]


@asynccontextmanager
async def fail_at(when_s: float, error: Callable[[], BatonError]) -> AsyncIterator[None]:
    """Cancel the body at `when_s` on the event loop's clock, and raise `error()`; other timeouts
    pass untouched."""
    scope = asyncio.timeout_at(when_s)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise error() from None


class Delivery:
    """Of one request. The body of `watching` ends when a piece takes too long.

    One timer that ticks again and again: one for each piece would cost as much as all else that the
    gateway does about it.
    """

    def __init__(
        self,
        request: ValidatedRequest,
        write: Write,
        timeline: Timeline,
        clock: Callable[[], float],
        stall_timeout_s: float,
    ) -> None:
        """clock: the timeline's. stall_timeout_s: longest time that a piece may take."""
        self._request = request
        self._request_id = request.spec.request_id
        self._has_logprobs = request.spec.sampling.logprobs >= 0
        self._write = write
        self._timeline = timeline
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        """To write a piece, while one is written; on the event loop's clock."""
        self._num_ended = sum(choice.has_ended for choice in request.resume_from.values())

    def send(
        self, index: int, piece: Piece, prompt_logprobs: tuple[TokenLogprobs, ...] | None
    ) -> Awaitable[object] | None:
        """Send the next piece of the output `index`; returns what Write does. The piece that ends
        the last output ends the stream.

        prompt_logprobs: known by the first piece, if they were asked for. One piece at a time.
        """
        if piece.samples:
            self._timeline.on_token_sent(self._clock())
        chunk = self._chunk_of(index, piece)
        request = self._request
        if piece.token_index == 0 and index not in request.resume_from:
            if request.echo_text is not None:
                chunk.text = request.echo_text + chunk.text
                chunk.prompt_token_ids.extend(request.spec.prompt_token_ids)
            if request.spec.sampling.prompt_logprobs >= 0 and index == 0:
                if prompt_logprobs is None:
                    raise EngineFault("the prompt's log probabilities never came")
                chunk.prompt_logprobs.extend(map(logprobs_to_proto, prompt_logprobs))
        if piece.finish is not FinishReason.NONE:
            self._num_ended += 1
            if self._num_ended == request.num_returned:
                self._complete(chunk, piece.finish)
        taken = self._write(chunk)
        return None if taken is None else self._wait(taken)

    async def _wait(self, taken: Awaitable[object]) -> None:
        self._began_s = self._loop.time()
        try:
            await taken
        finally:
            self._began_s = None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Cancel the body, and raise ClientStalled, at the moment that a piece takes too long."""
        timeout_s = self._stall_timeout_s
        scope = asyncio.timeout(None)
        timer: asyncio.TimerHandle | None = None

        def tick() -> None:
            nonlocal timer
            now_s = self._loop.time()
            due_s = (now_s if self._began_s is None else self._began_s) + timeout_s
            if due_s <= now_s:
                scope.reschedule(now_s)
            else:
                timer = self._loop.call_at(due_s, tick)

        try:
            async with scope:
                tick()
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            text = f"a chunk was not taken within {timeout_s:g} s; read faster"
            raise ClientStalled(text) from None
        finally:
            if timer is not None:
                timer.cancel()

    def _chunk_of(self, index: int, piece: Piece) -> inference_pb2.GenerateResponse:
        chunk = inference_pb2.GenerateResponse(
            request_id=self._request_id,
            choice=index,
            token_index=piece.token_index,
            token_ids=[sample.token_id for sample in piece.samples],
            text=piece.text,
        )
        if self._has_logprobs:
            chunk.logprobs.extend(
                logprobs_to_proto(s.logprobs) for s in piece.samples if s.logprobs
            )
        if piece.finish is FinishReason.NONE:
            return chunk  # what follows comes with the last piece alone
        chunk.finish_reason = sampling_pb2.FinishReason.ValueType(piece.finish)
        if piece.score is not None:
            chunk.score = piece.score
        if piece.stop is not None:
            chunk.stop_cause.stop = piece.stop
        elif piece.stop_token_id is not None:
            chunk.stop_cause.stop_token_id = piece.stop_token_id
        return chunk

    def _complete(self, chunk: inference_pb2.GenerateResponse, finish: FinishReason) -> None:
        timeline = self._timeline
        chunk.usage.prompt_tokens = len(self._request.spec.prompt_token_ids)
        num_earlier = sum(len(c.token_ids) for c in self._request.resume_from.values())
        chunk.usage.completion_tokens = num_earlier + timeline.num_output_tokens
        chunk.usage.cached_tokens = timeline.cached_tokens or 0
        chunk.usage.decode_cached_tokens = timeline.decode_cached_tokens or 0
        chunk.usage.draft_tokens = timeline.num_draft_tokens
        chunk.usage.accepted_tokens = timeline.num_accepted_tokens
        now_s = self._clock()
        timeline.finish = finish
        timeline.note(RequestEvent.FINISHED, now_s)
        chunk.timing.CopyFrom(timeline.to_proto(now_s))
