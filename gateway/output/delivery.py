"""Writes the pieces of a request's outputs to its client, one at a time, and detects a stalled
client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baton.errors import ClientStalled, EngineFault
from baton.telemetry.names import RequestEvent
from baton.types import FinishReason, TokenLogprobs
from baton.v1 import inference_pb2, sampling_pb2
from baton.wire import logprobs_to_proto
from gateway.intake.request import ValidatedRequest
from gateway.output.output import Piece
from gateway.telemetry.timing import Timeline

#: Send one chunk. Return None if the client's window accepted it, else an awaitable to await before
#: the next call. None avoids a coroutine per chunk for clients that keep up.
Write = Callable[[inference_pb2.GenerateResponse], Coroutine[Any, Any, object] | None]


class Delivery:
    """Writes the output of one request. The owner must call `close`.

    One periodic timer watches for a stalled write; a timer per piece would double the cost of
    delivery.
    """

    def __init__(
        self,
        request: ValidatedRequest,
        write: Write,
        timeline: Timeline,
        clock: Callable[[], float],
        stall_timeout_s: float,
        on_stall: Callable[[ClientStalled], None],
    ) -> None:
        """clock: of the timeline.
        on_stall: called when a piece takes longer than stall_timeout_s."""
        self._request = request
        self._request_id = request.spec.request_id
        self._has_logprobs = request.spec.sampling.logprobs >= 0
        self._write = write
        self._timeline = timeline
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._on_stall = on_stall
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._taken: asyncio.Future[Any] | None = None
        """Pending write, or None."""
        self._began_s = 0.0
        """Start of the pending write, on the event loop's clock."""
        self._num_ended = sum(choice.has_ended for choice in request.resume_from.values())

    def send(
        self, index: int, piece: Piece, prompt_logprobs: tuple[TokenLogprobs, ...] | None
    ) -> asyncio.Future[Any] | None:
        """Send the next piece of output `index`. Return None if the client accepted it, else a
        future; send nothing until it is done. The last piece of the last output ends the stream.

        prompt_logprobs: set by the first piece if requested.
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
        if taken is None:
            return None
        return self.wait_for(self._loop.create_task(taken))

    def wait_for(self, taken: asyncio.Future[Any]) -> asyncio.Future[None]:
        """Treat `taken` as a pending write: nothing is sent before it is done."""
        self._taken, self._began_s = taken, self._loop.time()
        if self._timer is None:
            due_s = self._began_s + self._stall_timeout_s
            self._timer = self._loop.call_at(due_s, self._tick)
        return taken

    def _tick(self) -> None:
        due_s = self._began_s + self._stall_timeout_s
        self._timer = None
        if self._taken is None or self._taken.done():
            return
        if due_s > self._loop.time():
            self._timer = self._loop.call_at(due_s, self._tick)
        else:
            text = f"a chunk was not taken within {self._stall_timeout_s:g} s; read faster"
            self._on_stall(ClientStalled(text))

    def close(self) -> None:
        """Cancel the pending write, and forget the owner, which would otherwise be in a cycle."""
        self._on_stall = _ignore
        if self._timer is not None:
            self._timer.cancel()
        if self._taken is not None:
            self._taken.cancel()

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
            return chunk  # usage and timings go with the last piece only
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


def _ignore(_: ClientStalled) -> None:
    pass
