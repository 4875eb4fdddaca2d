"""PrefillService: one call per prompt, from its submission to the end of its handoff."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from baton.errors import Overloaded
from baton.rpc.interceptor import send_headers
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

#: Presents a ticket to its owner, under the key that its prompt is then submitted with. Raises InvalidRequest if it is none.
Present = Callable[[str, bytes], None]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Translates between calls and the core's commands and events."""

    def __init__(
        self,
        submit: Callable[[PrefillCommand], None],
        has_room: Callable[[], bool],
        present: Present,
    ) -> None:
        """submit, has_room: the engine loop's."""
        self._submit = submit
        self._has_room = has_room
        self._present = present
        self._calls: dict[str, asyncio.Queue[PrefillEvent]] = {}
        self._next_key = itertools.count()

    def deliver(self, events: Sequence[PrefillEvent]) -> None:
        """Pass a step's events to their calls; a call that is gone wants none."""
        for event in events:
            call = self._calls.get(event.key)
            if call is not None:
                call.put_nowait(event)

    async def Prefill(  # noqa: N802
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        ticket, spec = request.ticket, sequence_from_proto(request.sequence)
        num_held = parse_ticket(ticket).num_cached_tokens if ticket else 0
        if not self._has_room():
            raise Overloaded("more waits for the engine loop than its inbox should hold")
        key = str(next(self._next_key))
        events: asyncio.Queue[PrefillEvent] = asyncio.Queue()
        if ticket:
            # Here, not in the engine loop: a step may take longer than the ticket's owner waits for this. From here on its
            # end is owed to the core, so that nothing may refuse the prompt any more.
            self._present(key, ticket)
        self._calls[key] = events
        self._submit(Submit(key, spec, ticket, num_held))
        is_over = False
        try:
            await send_headers(context)  # while the prompt is computed
            while not is_over:
                event = await events.get()
                is_over = not isinstance(event, Prefilled) or event.is_over or not ticket
                if isinstance(event, Prefilled):
                    yield _response(event)
                elif event.error:
                    raise event.error
        finally:
            del self._calls[key]
            if not is_over:
                self._submit(Abort(key))


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
