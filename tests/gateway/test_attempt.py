"""One stay on two workers, message by message."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import EngineFault, HandoffFailed, WorkerLost
from baton.events import Committed, Failed, Offered, Preempted, SequenceEvent, Tokens
from baton.types import BeamParams, FinishReason, Sample, SequenceSpec, Tier, WorkerLoad
from gateway.attempt import Attempt
from gateway.fleet import Fleet
from gateway.links import First, OnFirst, PrefillResult
from gateway.placement import Placement
from gateway.timing import Timeline
from tests.support.fake_workers import make_info
from tests.support.gateway_world import make_spec
from tests.support.stub_link import StubLink
from tests.support.virtual_loop import run_virtual


class StubPrefill:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[PrefillResult]] = []
        self.ends: list[asyncio.Future[None]] = []
        """Of the handoffs, after the answers."""

    async def prefill(
        self,
        spec: SequenceSpec,  # noqa: ARG002
        ticket: bytes,  # noqa: ARG002
        timeout_s: float,  # noqa: ARG002
        on_first: OnFirst,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.answers.append(loop.create_future())
        self.ends.append(loop.create_future())
        end = self.ends[-1]
        on_first(await self.answers[-1])
        await end


class Stage:
    """An opened attempt between two stubs."""

    def __init__(self, spec: SequenceSpec) -> None:
        fleet = Fleet(["p"], ["d"])
        self.prefill, self.decode = StubPrefill(), StubLink()
        fleet.join_prefill("p", make_info("p", Tier.PREFILL), self.prefill)
        fleet.join_decode("d", make_info("d", Tier.DECODE), self.decode)
        for address in ("p", "d"):
            fleet.report(address, WorkerLoad())
        self.fleet = fleet
        self.worker = fleet.workers["d"]
        placement = Placement(fleet, 1, fleet.workers["p"], self.worker, 5, 2, spec.num_choices)
        now_s = asyncio.get_running_loop().time()
        self.attempt = Attempt(placement, spec, Timeline(now_s), now_s + 1e6)
        self.attempt.open()

    async def tell(self, event: SequenceEvent, handle: int = 1) -> None:
        self.decode.tell(event, handle)
        await asyncio.sleep(1e-9)

    async def answer(self, *token_ids: int) -> None:
        firsts = tuple(First(Sample(token_id)) for token_id in token_ids)
        self.prefill.answers[0].set_result(PrefillResult(firsts, 0, 1.0, 1.0))
        await asyncio.sleep(1e-9)

    async def end_handoff(self, error: Exception | None) -> None:
        (end,) = self.prefill.ends
        if error:
            end.set_exception(error)
        else:
            end.set_result(None)
        await asyncio.sleep(1e-9)

    async def at_seat(self, number: int) -> list[object]:
        return list(await self.attempt.seats[number].inbox.take_all())


def one(index: int, token_id: int) -> Tokens:
    return Tokens(index, (Sample(token_id),))


def test_a_closed_attempt_hears_nothing() -> None:
    """A link may have had something on its way already."""

    async def main() -> None:
        stage = Stage(make_spec("a"))
        sink = stage.decode._sinks[1]
        stage.attempt.close()
        sink(Offered(b"t", 0))
        await asyncio.sleep(1e-9)
        assert stage.prefill.answers == []
        assert stage.worker.num_in_flight == 0

    run_virtual(main())


def test_what_the_decode_worker_tells_waits_for_the_first_tokens() -> None:
    async def main() -> None:
        stage = Stage(make_spec("a", num_choices=2))
        await stage.tell(Offered(b"t", 0))
        await stage.tell(Committed(0.0, 1))
        await stage.tell(one(0, 10), 1)
        await stage.tell(one(0, 20), 2)
        await stage.tell(one(1, 21), 2)
        await stage.tell(Preempted(), 2)
        await stage.answer(10, 20)
        assert await stage.attempt.part() is None
        assert await stage.at_seat(0) == [one(0, 10), one(0, 10)]
        assert await stage.at_seat(1) == [one(0, 20), one(0, 20), one(1, 21), Preempted()]
        stage.attempt.close()

    run_virtual(main())


def test_before_the_choices_part_there_what_happens_to_one_happens_to_all() -> None:
    async def main() -> None:
        stage = Stage(make_spec("a", num_choices=2))
        await stage.tell(Offered(b"t", 0))
        await stage.answer(10, 20)
        assert await stage.attempt.part() is None
        await stage.tell(Failed("HANDOFF_FAILED", "no KV came", is_retriable=True))
        for number in range(2):
            first, error = await stage.at_seat(number)
            assert isinstance(first, Tokens)
            assert isinstance(error, Exception)
        stage.attempt.close()

    run_virtual(main())


def test_the_outputs_of_a_search_come_together_or_not_at_all() -> None:
    async def main() -> None:
        spec = make_spec("a", num_choices=2, beam=BeamParams(2, num_returned=2))
        stage = Stage(spec)
        await stage.tell(Offered(b"t", 0))
        await stage.answer(1)
        await stage.tell(Committed(0.0, 1))
        parting = asyncio.create_task(stage.attempt.part())
        await stage.tell(Tokens(0, (Sample(4),), FinishReason.LENGTH, score=-1.0), 1)
        assert not parting.done()
        await stage.tell(Failed("WORKER_LOST", "gone", is_retriable=True), 2)
        assert isinstance((await asyncio.gather(parting, return_exceptions=True))[0], Exception)
        stage.attempt.close()

    run_virtual(main())


def test_choices_that_ended_early_are_ended_there_once_they_part() -> None:
    async def main() -> None:
        stage = Stage(make_spec("a", num_choices=3))
        await stage.tell(Offered(b"t", 0))
        await stage.answer(10, 20, 30)
        stage.attempt.seats[0].close()
        stage.attempt.seats[0].close()
        assert stage.decode.commands[1:] == []
        await stage.tell(Committed(0.0, 1))
        assert stage.decode.commands[1:] == [("abort", 1)]
        assert stage.worker.num_in_flight == 2
        stage.attempt.seats[2].close()
        assert stage.decode.commands[2:] == [("abort", 3)]
        assert stage.worker.num_in_flight == 1
        stage.attempt.seats[1].close()
        assert stage.decode.commands[3:] == [("abort", 2)]
        assert stage.worker.num_in_flight == 0

    run_virtual(main())


@pytest.mark.parametrize("error", [HandoffFailed("refused"), WorkerLost("gone"), EngineFault("x")])
def test_kv_that_cannot_be_delivered_ends_the_attempt_after_the_first_token_too(
    error: Exception,
) -> None:
    async def main() -> None:
        stage = Stage(make_spec("a"))
        await stage.tell(Offered(b"t", 0))
        await stage.answer(10)
        await stage.end_handoff(error)
        assert await stage.at_seat(0) == [one(0, 10), error]
        is_noted = isinstance(error, HandoffFailed)
        assert stage.fleet.broken_pairs.barred_from("d") == ({"p"} if is_noted else set())
        stage.attempt.close()
        assert stage.decode.commands[1:] == [("abort", 1)]

    run_virtual(main())


@pytest.mark.parametrize("error", [None, HandoffFailed("no word from the receiver")])
def test_once_the_decode_worker_has_the_kv_its_word_counts(error: Exception | None) -> None:
    async def main() -> None:
        stage = Stage(make_spec("a"))
        await stage.tell(Offered(b"t", 0))
        await stage.answer(10)
        await stage.tell(Committed(0.0, 1))
        await stage.end_handoff(error)
        await stage.tell(one(1, 11))
        assert await stage.at_seat(0) == [one(0, 10), one(1, 11)]
        assert not stage.fleet.broken_pairs.barred_from("d")
        stage.attempt.close()

    run_virtual(main())


def test_a_first_token_that_will_not_come_is_not_waited_for() -> None:
    """Though the decode worker has the KV: what the prefill worker told besides is lost with it."""

    async def main() -> None:
        stage = Stage(make_spec("a"))
        await stage.tell(Offered(b"t", 0))
        await stage.tell(Committed(0.0, 1))
        await stage.tell(one(0, 10))
        stage.prefill.answers[0].set_exception(WorkerLost("gone"))
        with pytest.raises(WorkerLost):
            await stage.attempt.part()
        stage.attempt.close()

    run_virtual(main())


def test_an_answer_without_a_first_token_for_each_choice_is_a_fault() -> None:
    async def main() -> None:
        stage = Stage(make_spec("a", num_choices=2))
        await stage.tell(Offered(b"t", 0))
        await stage.answer(10)
        with pytest.raises(EngineFault, match="1 first tokens came for 2 choices"):
            await stage.attempt.part()
        stage.attempt.close()

    run_virtual(main())


def test_what_was_cached_is_told_as_of_the_first_place() -> None:
    """Later ones find the request's own tokens."""

    async def main() -> None:
        stage = Stage(make_spec("a"))
        timeline = stage.attempt._timeline
        await stage.tell(Offered(b"t", 3))
        assert timeline.decode_cached_tokens == 3
        await stage.tell(Offered(b"t", 5))
        assert timeline.decode_cached_tokens == 3
        stage.attempt.close()

    run_virtual(main())


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
    reason: str, is_retriable: bool, error: type[Exception]
) -> None:
    async def main() -> None:
        stage = Stage(make_spec("a"))
        await stage.tell(Failed(reason, "why", is_retriable))
        with pytest.raises(error):
            await stage.attempt.part()
        stage.attempt.close()

    run_virtual(main())
