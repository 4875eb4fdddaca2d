"""PrefillService: one call per prompt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from baton.v1 import prefill_pb2, prefill_pb2_grpc, sampling_pb2
from baton.wire import logprobs_to_proto, sample_to_proto, sequence_from_proto
from kv_transfer.kv_ticket import parse_ticket
from prefill_svc.commands import (
    Abort,
    PrefillCommand,
    Prefilled,
    PrefillEvent,
    Submit,
)


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Translates between calls and the core's commands and events."""

    def __init__(self, submit: Callable[[PrefillCommand], None]) -> None:
        self._submit = submit
        self._answers: dict[str, asyncio.Future[Prefilled]] = {}
        self._next_key = itertools.count()

    def deliver(self, events: Sequence[PrefillEvent]) -> None:
        """Answer the calls that a step has settled; a call that is gone wants no answer."""
        for event in events:
            answer = self._answers.pop(event.key, None)
            if answer is None or answer.done():
                continue
            if isinstance(event, Prefilled):
                answer.set_result(event)
            else:
                answer.set_exception(event.error)

    async def Prefill(  # noqa: N802
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> prefill_pb2.PrefillResponse:
        num_held = parse_ticket(request.ticket).num_cached_tokens if request.ticket else 0
        key = str(next(self._next_key))
        answer: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        self._submit(Submit(key, sequence_from_proto(request.sequence), request.ticket, num_held))
        try:
            return _response(await answer)
        except asyncio.CancelledError:
            self._submit(Abort(key))
            raise
        finally:
            self._answers.pop(key, None)


def _response(done: Prefilled) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(
        first_tokens=[
            prefill_pb2.FirstToken(
                token=sample_to_proto(first.sample),
                finish_reason=sampling_pb2.FinishReason.ValueType(first.finish),
            )
            for first in done.firsts
        ],
        prompt_logprobs=map(logprobs_to_proto, done.prompt_logprobs),
        num_cached_tokens=done.num_cached_tokens,
        num_borrowed_tokens=done.num_borrowed_tokens,
        queue_ms=done.queue_s * 1000,
        compute_ms=done.compute_s * 1000,
    )
