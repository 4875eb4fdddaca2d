"""A prefill call's headers go out while its prompt is computed, so that the first token has them ahead of it."""

from __future__ import annotations

import grpc.aio
import pytest

from baton.errors import Cancelled
from baton.types import FinishReason, Sample, Sampling, SequenceSpec
from baton.v1 import prefill_pb2
from baton.wire import sequence_to_proto
from prefill_svc.commands import Abort, FirstToken, PrefillCommand, Prefilled, Submit
from prefill_svc.service import PrefillServicer

REQUEST = prefill_pb2.PrefillRequest(
    sequence=sequence_to_proto(SequenceSpec("r", (1, 2, 3), Sampling(max_tokens=4)))
)


class Desk:
    """An engine whose answer is there at once, beside a context that notes when headers are sent."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.log: list[object] = []
        self._is_broken = is_broken
        self.servicer = PrefillServicer(self._submit, lambda: True, lambda _key, _ticket: None)

    def _submit(self, command: PrefillCommand) -> None:
        self.log.append(command)
        if isinstance(command, Submit):
            first = FirstToken(Sample(7, None), FinishReason.NONE)
            self.servicer.deliver([Prefilled(command.key, (first,), 0, 0, 0.0, 0.0)])

    async def send_initial_metadata(self, metadata: object) -> None:
        if self._is_broken:
            raise grpc.aio.InternalError("the connection is gone")
        self.log.append(metadata)


async def test_headers_go_out_after_the_prompt_is_submitted_and_before_its_answer():
    desk = Desk()
    async for _ in desk.servicer.Prefill(REQUEST, desk):
        desk.log.append("answer")
    submit, *rest = desk.log
    assert isinstance(submit, Submit)
    assert rest == [(), "answer"]


async def test_a_prompt_whose_caller_is_gone_before_the_headers_is_given_up():
    desk = Desk(is_broken=True)
    with pytest.raises(Cancelled):
        async for _ in desk.servicer.Prefill(REQUEST, desk):
            pass
    submit, abort = desk.log
    assert isinstance(submit, Submit)
    assert abort == Abort(submit.key)
