"""An engine loop that has more to read than it should take: new work is refused before anything is
done for it, and what ends work gets through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.client import SamplingParams
from baton.commands import Abort, HandOff, Pause, Resume
from baton.events import Deferred, Failed, LocalPrefill
from baton.types import KvLayout, Sampling, SequenceSpec, WorkerIdentity
from baton.v1 import sequence_service_pb2
from baton.wire import sequence_to_proto, step_from_proto
from engine.oracle import oracle_tokens
from kv_transfer.ticket import parse_ticket
from tests.support.live_tiers import ONLY_DECODES, has_crossed, live_system
from tests.support.tickets import ticket_of
from worker_core.commands import (
    Command,
    KnownSequences,
    Open,
    StreamClosed,
    StreamCommand,
    StreamEvent,
)
from worker_core.loop import EngineLoop
from worker_core.sequence_service import SequenceServicer

LAYOUT = KvLayout("oracle", 4, 2, 8, "float32", 4)
SPEC = SequenceSpec("r", (1, 2, 3), Sampling(max_tokens=4))


def never() -> bool:
    return False


class StubContext:
    async def send_initial_metadata(self, metadata: object) -> None:
        """Nobody wants it."""


def nobody(key: str, ticket: bytes) -> int:
    raise AssertionError(f"{key} presented {ticket!r}")


def ticket() -> bytes:
    return ticket_of(WorkerIdentity("d0", 7), LAYOUT, 3)


async def served(
    servicer: SequenceServicer, *openings: sequence_service_pb2.OpenSequence
) -> list[Any]:
    """The first answers to as many openings."""
    answered = asyncio.Event()

    async def commands() -> AsyncIterator[sequence_service_pb2.ServeRequest]:
        for opening in openings:
            yield sequence_service_pb2.ServeRequest(open=opening)
        await answered.wait()

    answers: list[Any] = []
    context: Any = StubContext()
    async for response in servicer.Serve(commands(), context):
        answers += step_from_proto(response)
        if len(answers) == len(openings):
            answered.set()
    return answers


async def test_a_prompt_that_is_deferred_leaves_its_ticket_alone() -> None:
    told: list[Command] = []
    servicer = SequenceServicer(told.append, never, nobody)
    opening = sequence_service_pb2.OpenSequence(
        handle=1, sequence=sequence_to_proto(SPEC), send_to=ticket()
    )
    ((_, answer),) = await served(servicer, opening)
    assert isinstance(answer, Deferred)
    assert told == [StreamClosed(0)]


async def test_a_prompt_with_a_broken_ticket_is_refused_alone() -> None:
    told: list[Command] = []
    presented: list[str] = []
    sequence = sequence_to_proto(SPEC)
    broken = sequence_service_pb2.OpenSequence(handle=1, sequence=sequence, send_to=b"none")
    whole = sequence_service_pb2.OpenSequence(handle=2, sequence=sequence, send_to=ticket())

    def deliver(command: Command) -> None:
        told.append(command)
        if isinstance(command, Open):
            servicer.deliver([StreamEvent(0, command.handle, LocalPrefill(0))])

    def present(key: str, ticket: bytes) -> int:
        num_held = parse_ticket(ticket).num_cached_tokens
        presented.append(key)
        return num_held

    servicer = SequenceServicer(deliver, lambda: True, present)
    answers = await served(servicer, broken, whole)
    assert [(handle, type(event)) for handle, event in answers] == [(1, Failed), (2, LocalPrefill)]
    assert presented == [(0, 2)]
    assert [type(command) for command in told] == [Open, StreamClosed]


async def test_a_stream_whose_worker_is_full_goes_on_and_ends_what_it_has() -> None:
    told: list[Command] = []
    servicer = SequenceServicer(told.append, never, nobody)
    deferred = asyncio.Event()

    async def commands() -> AsyncIterator[sequence_service_pb2.ServeRequest]:
        for handle in (3, 4):
            opening = sequence_service_pb2.OpenSequence(
                handle=handle, sequence=sequence_to_proto(SPEC)
            )
            yield sequence_service_pb2.ServeRequest(open=opening)
        await deferred.wait()
        yield sequence_service_pb2.ServeRequest(pause=sequence_service_pb2.PauseSequence(handle=1))
        yield sequence_service_pb2.ServeRequest(
            resume=sequence_service_pb2.ResumeSequence(handle=1)
        )
        yield sequence_service_pb2.ServeRequest(
            hand_off=sequence_service_pb2.HandOffSequence(handle=1, ticket=b"t")
        )
        yield sequence_service_pb2.ServeRequest(abort=sequence_service_pb2.AbortSequence(handle=2))
        yield sequence_service_pb2.ServeRequest(
            known=sequence_service_pb2.KnownSequences(handles=[1])
        )

    answers: list[Any] = []
    context: Any = StubContext()
    async for response in servicer.Serve(commands(), context):
        answers += step_from_proto(response)
        if len(answers) == 2:
            deferred.set()
    assert [(handle, type(event)) for handle, event in answers] == [(3, Deferred), (4, Deferred)]
    assert told == [
        StreamCommand(0, 1, Pause()),
        StreamCommand(0, 1, Resume()),
        StreamCommand(0, 1, HandOff(b"t")),
        StreamCommand(0, 2, Abort()),
        KnownSequences(0, frozenset({1})),
        StreamClosed(0),
    ]


@pytest.mark.slow
async def test_a_request_waits_for_room_in_either_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers refuse new work in turn, several times; the request is served, as if nothing had
    been."""
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
