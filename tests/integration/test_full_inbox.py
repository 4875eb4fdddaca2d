"""An engine loop that has more to read than it should take: new work is refused before anything is done for it, and what
ends work gets through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.client import SamplingParams
from baton.engine.loop import EngineLoop
from baton.engine.oracle import oracle_tokens
from baton.errors import Overloaded
from baton.events import Deferred
from baton.types import KvLayout, Sampling, SequenceSpec, WorkerIdentity
from baton.v1 import prefill_pb2, sequence_service_pb2
from baton.wire import sequence_to_proto, step_from_proto
from kv_transfer.kv_ticket import KvTicket, encode_ticket
from prefill_svc.commands import PrefillCommand
from prefill_svc.service import PrefillServicer
from tests.support.live_tiers import ONLY_DECODES, has_crossed, live_system
from worker_core.commands import Abort, Command, HandOff, Known, Pause, Resume, StreamClosed
from worker_core.service import SequenceServicer

LAYOUT = KvLayout("oracle", 4, 2, 8, "float32", 4)
SPEC = SequenceSpec("r", (1, 2, 3), Sampling(max_tokens=4))


def never() -> bool:
    return False


async def test_a_prompt_that_is_refused_leaves_its_ticket_alone() -> None:
    told: list[PrefillCommand] = []
    presented: list[str] = []
    servicer = PrefillServicer(told.append, never, lambda key, _ticket: presented.append(key))
    ticket = encode_ticket(
        KvTicket(WorkerIdentity("d0", 7), 1, 1, "r", b"", 0, 3, LAYOUT, (), lease_s=30.0), bytes(32)
    )
    request = prefill_pb2.PrefillRequest(sequence=sequence_to_proto(SPEC), ticket=ticket)
    with pytest.raises(Overloaded):
        async for _ in servicer.Prefill(request, None):  # type: ignore[arg-type]
            pass
    assert not told
    assert not presented
    assert not servicer._calls


class StubContext:
    async def send_initial_metadata(self, metadata: object) -> None:
        """Nobody wants it."""


async def test_a_stream_whose_worker_is_full_goes_on_and_ends_what_it_has() -> None:
    told: list[Command] = []
    servicer = SequenceServicer(told.append, never)
    deferred = asyncio.Event()

    async def commands() -> AsyncIterator[sequence_service_pb2.DecodeRequest]:
        for handle in (3, 4):
            opening = sequence_service_pb2.OpenSequence(
                handle=handle, sequence=sequence_to_proto(SPEC)
            )
            yield sequence_service_pb2.DecodeRequest(open=opening)
        await deferred.wait()
        yield sequence_service_pb2.DecodeRequest(pause=sequence_service_pb2.PauseSequence(handle=1))
        yield sequence_service_pb2.DecodeRequest(
            resume=sequence_service_pb2.ResumeSequence(handle=1)
        )
        yield sequence_service_pb2.DecodeRequest(
            hand_off=sequence_service_pb2.HandOffSequence(handle=1, ticket=b"t")
        )
        yield sequence_service_pb2.DecodeRequest(abort=sequence_service_pb2.AbortSequence(handle=2))
        yield sequence_service_pb2.DecodeRequest(
            known=sequence_service_pb2.KnownSequences(handles=[1])
        )

    answers: list[Any] = []
    context: Any = StubContext()
    async for response in servicer.Decode(commands(), context):
        answers += step_from_proto(response)
        if len(answers) == 2:
            deferred.set()
    assert [(handle, type(event)) for handle, event in answers] == [(3, Deferred), (4, Deferred)]
    assert told == [
        Pause(0, 1),
        Resume(0, 1),
        HandOff(0, 1, b"t"),
        Abort(0, 2),
        Known(0, frozenset({1})),
        StreamClosed(0),
    ]


async def test_a_request_waits_for_room_in_either_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers refuse new work in turn, several times; the request is served, as if nothing had been."""
    answers = [False, False, True, False, True, False]
    monkeypatch.setattr(EngineLoop, "has_room", lambda _loop: answers.pop(0) if answers else True)
    prompt = list(range(1, 40))
    async with live_system(
        worker_options={"kv_transport": "tcp"}, decode_options=ONLY_DECODES
    ) as system:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        result = await system.client.generate(prompt, params)
        assert result.token_ids == tuple(oracle_tokens(prompt, Sampling(max_tokens=12), 1000))
        assert has_crossed(result)
        await system.until_quiet()
    assert not answers
