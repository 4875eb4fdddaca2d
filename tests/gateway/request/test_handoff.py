"""A sequence's way from its source to its owner, message by message."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import BatonError, EngineFault, HandoffFailed, InvalidRequest, WorkerLost
from baton.events import (
    Committed,
    Failed,
    HandedOff,
    LocalPrefill,
    NotHandedOff,
    Offered,
    Preempted,
    Prefilled,
    SequenceEvent,
    Tokens,
)
from baton.types import BeamParams, FinishReason, KvSource, Sample
from gateway.intake.request import TextOptions
from gateway.request import state
from tests.support.fake_workers import prompt_logprobs_of, text_of
from tests.support.gateway_world import make_spec
from tests.support.stub_world import StubWorld, in_stub_world, settle

PREFILLED = Prefilled(0, 0, 1.0, 1.0)
COMMITTED = Committed(0.0, 1)
LOST = Failed("WORKER_LOST", "gone", is_retriable=True)
UNDELIVERED = NotHandedOff("HANDOFF_FAILED", "refused")


def one(index: int, token_id: int) -> Tokens:
    return Tokens(index, (Sample(token_id),))


async def prefilled(world: StubWorld, *token_ids: int) -> None:
    """The source reports what it computed."""
    await world.emit("p", PREFILLED)
    for handle, token_id in enumerate(token_ids, start=1):
        await world.emit("p", one(0, token_id), handle=handle)


def test_the_source_is_opened_with_the_ticket_and_the_home_with_its_source() -> None:
    async def test(world: StubWorld) -> None:
        assert world.links["d"].commands == [("open", KvSource.PREFILL)]
        await world.emit("d", Offered(b"t", 0))
        assert world.links["p"].commands == [("open", KvSource.LOCAL, b"t")]
        await prefilled(world, 10)
        assert world.tokens_of(0) == [10], "before the owner has the KV"
        await world.emit("p", HandedOff())
        await world.emit("d", COMMITTED, one(0, 10), one(1, 11))
        assert world.tokens_of(0) == [10, 11]

    in_stub_world(test, make_spec("a"))


def test_a_request_that_was_given_up_hears_nothing() -> None:
    """A link may have had something on its way already."""

    async def test(world: StubWorld) -> None:
        sink = world.links["d"]._sinks[1]
        world.running.cancel()
        await settle()
        sink(Offered(b"t", 0))
        await settle()
        assert world.links["p"].commands == []
        world.check_empty()

    in_stub_world(test, make_spec("a"))


def test_what_the_home_reports_waits_for_the_source() -> None:
    async def test(world: StubWorld) -> None:
        await world.emit("d", Offered(b"t", 0), COMMITTED, one(0, 10))
        await world.emit("d", one(0, 20), one(1, 21), Preempted(), handle=2)
        assert world.client.chunks == []
        assert len(world.links["d"].specs) == 1
        await prefilled(world, 10, 20)
        assert world.tokens_of(0) == [10]
        assert world.tokens_of(1) == [20, 21]
        (again,) = world.links["d"].specs[1:]
        assert (again.choice, again.output_token_ids) == (1, (20, 21)), "preempted"

    in_stub_world(test, make_spec("a", num_choices=2))


def test_before_the_choices_fork_at_the_home_what_happens_to_one_happens_to_all() -> None:
    async def test(world: StubWorld) -> None:
        await world.emit("d", Offered(b"t", 0))
        await prefilled(world, 10, 20)
        await world.emit("d", Failed("HANDOFF_FAILED", "no KV came", is_retriable=True))
        again = world.links["d"].specs[1:]
        assert [(spec.choice, spec.output_token_ids) for spec in again] == [(0, (10,)), (1, (20,))]

    in_stub_world(test, make_spec("a", num_choices=2))


def test_the_outputs_of_a_search_come_together_or_not_at_all() -> None:
    async def test(world: StubWorld) -> None:
        await world.emit("d", Offered(b"t", 0))
        await world.emit("p", PREFILLED, HandedOff())
        await world.emit("d", COMMITTED, Tokens(0, (Sample(4),), FinishReason.LENGTH, score=-1.0))
        assert world.client.chunks == []
        await world.emit("d", LOST, handle=2)
        assert world.client.chunks == []
        assert [spec.output_token_ids for spec in world.links["d"].specs] == [(), ()]

    beam = BeamParams(2, num_returned=2)
    in_stub_world(test, make_spec("a", num_choices=2, beam=beam))


def test_choices_that_ended_early_are_ended_at_the_home_once_they_fork() -> None:
    async def test(world: StubWorld) -> None:
        commands, worker = world.links["d"].commands, world.fleet.workers["d"]
        await world.emit("d", Offered(b"t", 0))
        await prefilled(world, 10, 20, 30)
        assert world.client.of_choice(0).last.stop_cause.stop, "its first token is a stop string"
        assert commands[1:] == []
        await world.emit("d", COMMITTED)
        assert commands[1:] == [("abort", 1)]
        assert worker.num_in_flight == 2
        await world.emit("d", Tokens(0, (Sample(30), Sample(10))), handle=3)
        assert commands[2:] == [("abort", 3)]
        assert worker.num_in_flight == 1
        await world.emit("d", one(1, 10), handle=2)
        assert commands[3:] == [("abort", 2)]
        assert worker.num_in_flight == 0
        assert world.running.done()

    text = TextOptions(stop=(text_of([10]),))
    in_stub_world(test, make_spec("a", num_choices=3), text=text)


@pytest.mark.parametrize(
    ("event", "is_noted"),
    [
        (UNDELIVERED, True),
        (Failed("HANDOFF_FAILED", "refused", is_retriable=True), True),
        (LOST, False),
    ],
)
def test_kv_that_cannot_be_delivered_sends_it_elsewhere_after_the_first_token_too(
    event: SequenceEvent, *, is_noted: bool
) -> None:
    async def test(world: StubWorld) -> None:
        await world.emit("d", Offered(b"t", 0))
        await prefilled(world, 10)
        await world.emit("p", event)
        assert world.fleet.broken_pairs.barred_from("d") == ({"p"} if is_noted else set())
        assert world.links["d"].commands[1:2] == [("abort", 1)]
        assert [spec.output_token_ids for spec in world.links["d"].specs[1:]] == [(10,)]
        assert world.choice.avoid == {"p", "d"}
        assert world.choice.unreached == ({"d"} if is_noted else set())

    in_stub_world(test, make_spec("a"))


def test_a_fault_of_the_source_ends_the_request() -> None:
    async def test(world: StubWorld) -> None:
        await world.emit("d", Offered(b"t", 0))
        await prefilled(world, 10)
        await world.emit("p", Failed("ENGINE_FAULT", "x", is_retriable=False))
        assert isinstance(world.error, EngineFault)
        assert world.tokens_of(0) == [10]

    in_stub_world(test, make_spec("a"))


@pytest.mark.parametrize("event", [HandedOff(), UNDELIVERED, LOST])
def test_once_the_home_has_the_kv_its_word_counts(event: SequenceEvent) -> None:
    async def test(world: StubWorld) -> None:
        await world.emit("d", Offered(b"t", 0))
        await prefilled(world, 10)
        await world.emit("d", COMMITTED)
        await world.emit("p", event)
        await world.emit("d", one(1, 11))
        assert world.tokens_of(0) == [10, 11]
        assert not world.fleet.broken_pairs.barred_from("d")
        assert not world.links["p"].open_handles, "nothing is kept there"
        assert len(world.links["d"].specs) == 1

    in_stub_world(test, make_spec("a"))


def test_what_the_source_did_not_live_to_report_is_not_waited_for() -> None:
    """Though the owner has the KV: what the source would have reported besides is lost with it."""

    async def test(world: StubWorld) -> None:
        await world.emit("d", Offered(b"t", 0), COMMITTED, one(0, 10))
        await world.emit("p", LOST)
        assert len(world.links["d"].specs) == 2
        assert world.client.chunks == []

    in_stub_world(test, make_spec("a"))


def test_a_handoff_before_the_prompt_is_computed_is_a_fault() -> None:
    async def test(world: StubWorld) -> None:
        await world.emit("d", Offered(b"t", 0))
        await world.emit("p", HandedOff())
        with pytest.raises(EngineFault, match="before its prompt was reported as computed"):
            await world.running

    in_stub_world(test, make_spec("a"))


def test_what_was_cached_is_reported_as_of_the_first_place() -> None:
    """Later ones find the request's own tokens."""

    async def test(world: StubWorld) -> None:
        await world.emit("d", Offered(b"t", 3))
        assert world.timeline.decode_cached_tokens == 3
        await world.emit("d", Preempted())
        await world.emit("d", Offered(b"t", 5), handle=2)
        assert len(world.links["p"].specs) == 2
        assert world.timeline.decode_cached_tokens == 3

    in_stub_world(test, make_spec("a"))


def test_a_prompt_that_its_home_computes_has_its_times_too() -> None:
    async def test(world: StubWorld) -> None:
        scored = prompt_logprobs_of(world.spec)
        await world.emit("d", LocalPrefill(2), Prefilled(2, 0, 3.0, 4.0, scored), one(0, 10))
        timing = world.timeline.to_proto(1.0)
        assert (timing.prefill_queue_ms, timing.prefill_ms) == (3.0, 4.0)
        assert world.timeline.cached_tokens == 2
        assert len(world.client.chunks[0].prompt_logprobs) == len(scored)
        assert not any(worker.outstanding_tokens for worker in world.fleet.workers.values())

    in_stub_world(test, make_spec("a", prompt_logprobs=1))


@pytest.mark.parametrize(
    ("reason", "is_retriable", "error"),
    [
        ("WORKER_LOST", True, WorkerLost),
        ("ENGINE_FAULT", False, EngineFault),
        ("ENGINE_FAULT", True, HandoffFailed),
        ("WORKER_LOST", False, EngineFault),
        ("OF_A_LATER_VERSION", True, HandoffFailed),
        ("OF_A_LATER_VERSION", False, EngineFault),
    ],
)
def test_whether_another_try_may_help_is_the_worker_s_word(
    reason: str, error: type[BatonError], *, is_retriable: bool
) -> None:
    async def test(world: StubWorld) -> None:
        await world.emit("d", Failed(reason, "why", is_retriable))
        if is_retriable:
            assert [type(failure) for failure in world.choice.failures] == [error]
            assert len(world.links["d"].specs) == 2
        else:
            assert isinstance(world.error, error)

    in_stub_world(test, make_spec("a"))


def test_what_a_worker_refuses_is_refused_by_its_field() -> None:
    async def test(world: StubWorld) -> None:
        text = "sampling.structured_output: costs more: make it simpler"
        await world.emit("d", Failed("INVALID_REQUEST", text, is_retriable=False))
        assert isinstance(world.error, InvalidRequest)
        (violation,) = world.error.violations
        assert violation.field == "sampling.structured_output"
        assert world.error.message == text

    in_stub_world(test, make_spec("a"))


@pytest.mark.parametrize("has_first_token", [False, True])
def test_kv_without_an_end_is_given_up_at_both_workers(*, has_first_token: bool) -> None:
    """Only once it is all computed: until then a prompt may take as long as the request has
    time."""

    async def test(world: StubWorld) -> None:
        await world.emit("d", Offered(b"t", 0))
        await asyncio.sleep(10 * state.HANDOFF_TIMEOUT_S)
        assert len(world.links["p"].specs) == 1
        await prefilled(world, *([10] if has_first_token else []))
        await asyncio.sleep(state.HANDOFF_TIMEOUT_S + 1)
        assert ("abort", 1) in world.links["p"].commands
        assert world.links["d"].commands[1] == ("abort", 1)
        assert isinstance(world.choice.failures[0], HandoffFailed)
        assert len(world.links["d"].specs) == 2

    in_stub_world(test, make_spec("a"))
