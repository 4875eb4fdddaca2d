"""One request's life, from the queue to its last chunk.

1. wait for a place                    dispatcher.py
2. open it there, prefill, hand off    attempt.py
3. send what came, as one chunk for all that is there
4. placed no longer, but not at its end: back to 1, with the tokens so far
However it ends, both workers are told at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from baton.errors import (
    BatonError,
    ClientStalled,
    DeadlineExceeded,
    NoWorkers,
    RetriableError,
)
from baton.telemetry import Phase, RequestEvent
from baton.types import SequenceSpec
from baton.v1 import inference_pb2, sampling_pb2
from baton.wire import logprobs_to_proto
from gateway.attempt import Attempt, Outcome
from gateway.dispatcher import Dispatcher
from gateway.fail_at import fail_at
from gateway.fleet import Fleet
from gateway.output import Output, Piece
from gateway.placement import Placement
from gateway.request import ValidatedRequest
from gateway.timing import Timeline

#: Failures of workers that one request outlives; preemptions and deferrals are not counted.
MAX_FAILURES = 3

#: Sends one chunk; returns when the client's window took it.
Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]

#: Token ids to text; the flag tells whether special tokens are left out.
TextOf = Callable[[Sequence[int], bool], str]


@dataclass(frozen=True, slots=True)
class RelayContext:
    """What all requests share."""

    fleet: Fleet
    dispatcher: Dispatcher
    text_of: TextOf
    client_stall_timeout_s: float
    clock: Callable[[], float] | None = None
    """Of arrivals and timelines, in seconds; the event loop's own, which may be coarse, if not given."""


class Relay:
    """One request. `deadline_s` is on the event loop's clock, all other times on the context's."""

    def __init__(
        self,
        context: RelayContext,
        request: ValidatedRequest,
        write: Write,
        deadline_s: float,
        timeline: Timeline | None = None,
    ) -> None:
        """timeline: the request's, from its arrival on, for whoever wants to read it; one of the relay's if not given."""
        skip_special_tokens = request.text.skip_special_tokens
        self._context = context
        self._request = request
        self._write = write
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._clock = context.clock or self._loop.time
        self._timeline = timeline or Timeline(request.arrival_s)
        self._timeline.tokenize_ms = request.tokenize_ms
        self._output = Output(
            lambda ids: context.text_of(ids, skip_special_tokens),
            request.text,
            request.spec.sampling.min_tokens,
        )
        self._failures: list[BatonError] = []
        self._avoid: frozenset[str] = frozenset()

    async def run(self, on_admitted: Callable[[], Awaitable[None]] | None = None) -> None:
        """Stream the output. `on_admitted` is awaited once the request is in the queue.

        Raises BatonError with the request's id.
        """
        try:
            async with fail_at(self._deadline_s, self._time_is_over):
                await self._run(on_admitted)
        except BatonError as error:
            error.request_id = error.request_id or self._request.spec.request_id
            raise

    def _time_is_over(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the request's time was over with {self._output.num_tokens} tokens produced"
        )

    async def _run(self, on_admitted: Callable[[], Awaitable[None]] | None) -> None:
        is_return = False
        while True:
            spec = self._spec_so_far()
            placement = await self._place(spec, is_return, on_admitted)
            is_return, on_admitted = True, None
            attempt = Attempt(
                placement, spec, self._output, self._timeline, self._deadline_s, self._clock
            )
            try:
                outcome = await self._follow(attempt)
            except RetriableError as error:
                self._note_failure(error, placement)
                continue
            finally:
                attempt.close()
            if outcome is Outcome.OVER:
                self._remember(placement)
                await self._send(is_last=True)
                return
            if outcome is Outcome.PREEMPTED:
                self._note_resume()

    def _note_resume(self) -> None:
        self._timeline.num_resumes += 1
        self._timeline.note(RequestEvent.RESUMED, self._clock())

    def _spec_so_far(self) -> SequenceSpec:
        spec = self._request.spec
        return spec.extended(self._output.token_ids[len(spec.output_token_ids) :])

    async def _place(
        self,
        spec: SequenceSpec,
        is_return: bool,
        on_admitted: Callable[[], Awaitable[None]] | None,
    ) -> Placement:
        queued_s = self._clock()
        self._timeline.enter(Phase.QUEUE, queued_s)
        self._timeline.note(RequestEvent.QUEUED, queued_s)
        try:
            placement = await self._context.dispatcher.place(
                spec, on_admitted=on_admitted, is_return=is_return, avoid=self._avoid
            )
        except NoWorkers:
            if self._failures:
                raise self._failures[-1] from None
            raise
        placed_s = self._clock()
        self._timeline.queue_ms += (placed_s - queued_s) * 1e3
        self._timeline.note(RequestEvent.PLACED, placed_s)
        self._timeline.name_workers(placement.prefill_name, placement.decode_name)
        return placement

    async def _follow(self, attempt: Attempt) -> Outcome:
        attempt.open()
        outcome = Outcome.GOES_ON
        while outcome is Outcome.GOES_ON:
            outcome = await attempt.step()
            if outcome is not Outcome.OVER:
                await self._send(is_last=False)
        return outcome

    def _note_failure(self, error: RetriableError, placement: Placement) -> None:
        """Count a failure, and see to it that the next try goes elsewhere if it can. Raises the last one too many."""
        self._failures.append(error)
        self._timeline.note(RequestEvent.FAILED, self._clock())
        if len(self._failures) > MAX_FAILURES:
            raise error
        self._note_resume()
        for worker in (placement.prefill, placement.decode):
            if worker is not None:
                self._avoid |= {worker.address}

    def _remember(self, placement: Placement) -> None:
        if placement.decode is not None:
            self._context.dispatcher.record(placement.decode, self._spec_so_far())

    async def _send(self, *, is_last: bool) -> None:
        """Send all that is new, if anything is."""
        piece = self._output.take()
        if piece is None:
            return
        if piece.samples:
            self._timeline.token_came(self._clock())
            self._timeline.num_output_tokens = self._output.num_tokens
        chunk = _chunk_of(self._request, piece)
        if is_last:
            self._complete(chunk)
        # Once per chunk, hence the plain scope in place of fail_at, which costs twice as much.
        scope = asyncio.timeout(self._context.client_stall_timeout_s)
        try:
            async with scope:
                await self._write(chunk)
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._client_stalled() from None

    def _client_stalled(self) -> ClientStalled:
        limit_s = self._context.client_stall_timeout_s
        return ClientStalled(f"a chunk was not taken within {limit_s:g} s; read faster")

    def _complete(self, chunk: inference_pb2.GenerateResponse) -> None:
        timeline = self._timeline
        chunk.usage.prompt_tokens = len(self._request.spec.prompt_token_ids)
        chunk.usage.completion_tokens = self._output.num_tokens
        chunk.usage.cached_tokens = timeline.cached_tokens or 0
        chunk.usage.decode_cached_tokens = timeline.decode_cached_tokens or 0
        now_s = self._clock()
        timeline.finish = self._output.finish
        timeline.note(RequestEvent.FINISHED, now_s)
        chunk.timing.CopyFrom(timeline.to_proto(now_s))


def _chunk_of(request: ValidatedRequest, piece: Piece) -> inference_pb2.GenerateResponse:
    chunk = inference_pb2.GenerateResponse(
        request_id=request.spec.request_id,
        choice=request.spec.choice,
        token_index=piece.token_index,
        token_ids=[sample.token_id for sample in piece.samples],
        text=piece.text,
        finish_reason=sampling_pb2.FinishReason.ValueType(piece.finish),
    )
    if request.spec.sampling.logprobs >= 0:
        chunk.logprobs.extend(logprobs_to_proto(s.logprobs) for s in piece.samples if s.logprobs)
    if piece.stop is not None:
        chunk.stop_cause.stop = piece.stop
    elif piece.stop_token_id is not None:
        chunk.stop_cause.stop_token_id = piece.stop_token_id
    return chunk
