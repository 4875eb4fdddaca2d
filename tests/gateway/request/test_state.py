"""The reducer alone, in whatever order events come: no token is lost or doubled, no claim or handle
is left, and nothing waits without a deadline."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from baton.commands import Abort, HandOff, Pause, Resume
from baton.events import (
    Committed,
    Deferred,
    Failed,
    HandedOff,
    LocalPrefill,
    NotHandedOff,
    Offered,
    Paused,
    Preempted,
    Prefilled,
    SequenceEvent,
    Tokens,
)
from baton.types import (
    BeamParams,
    BlockCounts,
    FinishReason,
    Sample,
    SequenceSpec,
    Tier,
    WorkerLoad,
)
from gateway.intake.decoding import Decoding
from gateway.intake.request import TextOptions
from gateway.output.output import ChoiceOutput
from gateway.request.assignment import (
    AbortSource,
    Action,
    Assignment,
    Choice,
    Close,
    Deliver,
    EndMigration,
    Fail,
    Open,
    OpenSource,
    Place,
    SendCommand,
    SetTimer,
    State,
    Update,
)
from gateway.request.state import RequestState
from gateway.routing.fleet import Fleet
from gateway.routing.placement import Placement
from gateway.telemetry.timing import Timeline
from tests.support.fake_workers import expected_output, make_info, text_of
from tests.support.gateway_world import make_spec
from tests.support.stub_link import StubLink

NO_ROOM = Deferred("full")
DRAINING = Failed("DRAINING", "takes no more", is_retriable=True)
LOST = Failed("WORKER_LOST", "gone", is_retriable=True)
UNDELIVERED = Failed("HANDOFF_FAILED", "no way", is_retriable=True)
NOT_HANDED_OFF = NotHandedOff("HANDOFF_FAILED", "no way")


@dataclass(eq=False)
class Opened:
    """A sequence on a worker that does what the test draws, in the limits of what a worker may do.

    outputs: of each of its numbers, whole. ended: numbers that hear nothing any more.
    """

    spec: SequenceSpec
    assignment: Assignment
    is_source: bool
    outputs: list[list[int]]
    stage: str
    """new, offered, arrived, computing, running, pausing, paused, sending, over."""
    forked: bool = False
    ended: set[int] = field(default_factory=set)
    at: dict[int, int] = field(default_factory=dict)
    """By number: how many tokens of the output have been reported."""
    ticket: Opened | None = None
    """The sequence that its KV goes to."""
    has_kv: bool = False

    @property
    def live(self) -> list[int]:
        return [number for number in range(len(self.outputs)) if number not in self.ended]

    @property
    def is_search(self) -> bool:
        return self.spec.sampling.beam is not None


class Rig:
    """A request's reducer, with workers that draw their next event."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        num_choices = self.rng.choice([1, 1, 2, 3])
        is_search = self.rng.random() < 0.15
        beam = BeamParams(num_choices, num_returned=num_choices) if is_search else None
        max_tokens = self.rng.choice([1, 2, 6, 12])
        self.spec = make_spec("a", num_choices=num_choices, max_tokens=max_tokens, beam=beam)
        self.fleet = Fleet(["p", "q"], ["d", "e"])
        for address, worker in self.fleet.workers.items():
            self.fleet.join(address, make_info(address, worker.tier), StubLink())
            self.fleet.report(address, WorkerLoad(blocks=BlockCounts(64, 0, 0)))
        stop = (text_of([self.rng.randrange(97)]),) if self.rng.random() < 0.5 else ()
        text = TextOptions(stop=stop)
        outputs = [ChoiceOutput(Decoding(text_of), text, 0) for _ in range(num_choices)]
        self.state = RequestState(self.spec, outputs, Timeline(0.0))
        self.now_s = 0.0
        self.error: Exception | None = None
        self.news: dict[Choice, None] = {}
        self.waiting: list[Assignment] = []
        self.timers: dict[Assignment, float] = {}
        self.homes: dict[Assignment, Opened] = {}
        self.sources: dict[Assignment, Opened] = {}
        self.tickets: dict[bytes, Opened] = {}
        self.placements: list[Placement] = []
        self.opened: list[Opened] = []
        self.migrations: list[Choice] = []
        self.sent: list[list[int]] = [[] for _ in range(num_choices)]
        self.finished: set[int] = set()

    # Actions

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self.perform_one(action)
        self.check_deadlines()

    def perform_one(self, action: Action) -> None:  # noqa: PLR0912, one arm per action
        match action:
            case Place(assignment):
                self.waiting.append(assignment)
            case Open(assignment):
                self.homes[assignment] = self.open(assignment, is_source=False)
            case OpenSource(assignment, _, ticket):
                source = self.sources[assignment] = self.open(assignment, is_source=True)
                source.ticket = self.tickets.pop(ticket)
            case SendCommand(assignment, number, Pause()):
                self.opened_alone(assignment, number).stage = "pausing"
            case SendCommand(assignment, number, HandOff(ticket)):
                origin = self.opened_alone(assignment, number)
                if origin.stage == "paused":
                    origin.ticket, origin.stage = self.tickets.pop(ticket), "sending"
            case SendCommand(assignment, number, Resume()):
                origin = self.opened_alone(assignment, number)
                if origin.stage in ("paused", "pausing"):
                    origin.stage = "running"
            case SendCommand(assignment, number, Abort()):
                assert self.homes[assignment].forked, "not before they fork"
                self.homes[assignment].ended.add(number)
            case AbortSource(assignment):
                self.end(self.sources[assignment])
            case Close(assignment):
                self.close(assignment)
            case SetTimer(assignment, None):
                self.timers.pop(assignment, None)
            case SetTimer(assignment, float() as delay_s):
                self.timers[assignment] = self.now_s + delay_s
            case Update(placement, outcome):
                placement.record(outcome)
            case EndMigration(choice):
                self.migrations.remove(choice)
            case Deliver(choice):
                self.news[choice] = None
            case Fail(error):
                self.error = error

    def open(self, assignment: Assignment, *, is_source: bool) -> Opened:
        spec = assignment.spec
        outputs = [expected_output(spec.choice_alone(n)) for n in range(spec.num_choices)]
        start = len(spec.output_token_ids)
        opened = Opened(spec, assignment, is_source, outputs, "new")
        opened.at = dict.fromkeys(range(spec.num_choices), start)
        self.opened.append(opened)
        return opened

    def opened_alone(self, assignment: Assignment, number: int) -> Opened:
        """Choices that have forked are paused one by one; the rig keeps one stage for all of them,
        so it moves single ones."""
        assert len(assignment.choices) == 1, number
        return self.homes[assignment]

    def close(self, assignment: Assignment) -> None:
        if assignment in self.waiting:
            self.waiting.remove(assignment)
        self.timers.pop(assignment, None)
        for opened in (self.homes.get(assignment), self.sources.get(assignment)):
            if opened is not None:
                self.end(opened)
        if assignment.placement is not None:
            assignment.placement.release()

    @staticmethod
    def end(opened: Opened) -> None:
        opened.stage = "over"
        opened.ended.update(range(len(opened.outputs)))

    # What may happen next

    def steps(self) -> Iterator[Callable[[], None]]:
        for assignment in self.waiting:
            yield partial(self.place, assignment)
        for opened in self.opened:
            for number, event in self.words_of(opened):
                yield partial(self.say, opened, number, event)
            owner = opened.ticket
            is_sent = opened.stage in ("computing", "running", "sending")
            if owner is not None and owner.stage == "offered" and is_sent:
                yield partial(self.arrive, owner)
        for choice in self.news:
            yield partial(self.deliver, choice)
            yield partial(self.deliver, choice)
        for choice in self.state.choices:
            assignment = choice.assignment
            is_alone = assignment is not None and len(assignment.choices) == 1
            if is_alone and self.state.is_movable(choice):
                yield partial(self.migrate, choice)
        if self.rng.random() < 0.05:
            for assignment in self.timers:
                yield partial(self.fire, assignment)

    def words_of(self, opened: Opened) -> list[tuple[int, SequenceEvent]]:
        """What a worker may report of a sequence now, by number."""
        if not opened.live or opened.stage == "over":
            return []
        if opened.is_source:
            return self.words_of_source(opened)
        numbers = opened.live if opened.forked else [0]
        trouble: list[SequenceEvent] = [Preempted(), LOST] if self.rng.random() < 0.2 else []
        words: list[tuple[int, SequenceEvent]] = [(n, e) for n in numbers for e in trouble]
        match opened.stage:
            case "new":
                local = LocalPrefill(0)
                can_wait = self.source_of(opened)
                words += [(0, Offered(b"", 0) if can_wait else local)] * 4
                words += [(0, NO_ROOM), (0, DRAINING), (0, local)]
            case "offered":
                words += [(0, UNDELIVERED)] if self.rng.random() < 0.2 else []
            case "arrived":
                words += [(0, Committed(1.0, 1))]
            case "computing":
                words += [(0, Prefilled(0, 0, 1.0, 1.0))]
            case "running":
                words += [(n, self.next_tokens(opened, n)) for n in opened.live]
            case "pausing":
                words += [(n, self.next_tokens(opened, n)) for n in opened.live]
                words += [(0, Paused())] * 3 + [(0, NOT_HANDED_OFF)]
            case "sending":
                words += self.ends_of(opened)
        return words

    def words_of_source(self, opened: Opened) -> list[tuple[int, SequenceEvent]]:
        trouble = [(0, LOST), (0, UNDELIVERED)] if self.rng.random() < 0.2 else []
        match opened.stage:
            case "new":
                return [(0, LocalPrefill(0)), (0, DRAINING), *trouble]
            case "computing":
                return [(0, Prefilled(0, 0, 1.0, 1.0)), *trouble]
            case "running":
                return [(n, self.next_tokens(opened, n, one=True)) for n in opened.live[:1]]
            case "sending":
                return [*trouble, *self.ends_of(opened)]
        return []

    def source_of(self, opened: Opened) -> bool:
        assignment = opened.assignment
        placement = assignment.placement
        return assignment.origin is not None or (
            placement is not None and placement.source is not None
        )

    def next_tokens(self, opened: Opened, number: int, *, one: bool = False) -> Tokens:
        output, start = opened.outputs[number], opened.at[number]
        count = 1 if one else self.rng.choice([1, 1, 2, 5])
        if opened.is_search:
            count = len(output)
        samples = tuple(map(Sample, output[start : start + count]))
        is_end = start + len(samples) == len(output)
        score = -1.0 if opened.is_search else None
        finish = FinishReason.LENGTH if is_end else FinishReason.NONE
        return Tokens(start, samples, finish, score=score)

    def ends_of(self, opened: Opened) -> list[tuple[int, SequenceEvent]]:
        """What a worker may say of KV that it sends: that it got there, or that it did not, though
        it may have."""
        did_arrive = opened.ticket is not None and opened.ticket.has_kv
        ends: list[tuple[int, SequenceEvent]] = [(0, HandedOff())] if did_arrive else []
        return [*ends, (0, NOT_HANDED_OFF)] if self.rng.random() < 0.2 else ends

    @staticmethod
    def arrive(owner: Opened) -> None:
        """All KV is at the owner, which has not said so yet."""
        owner.stage, owner.has_kv = "arrived", True

    # What happens

    def say(self, opened: Opened, number: int, event: SequenceEvent) -> None:
        if number in opened.ended:
            return
        if isinstance(event, Offered):
            event = Offered(str(len(self.opened) * 100 + len(self.tickets)).encode(), 0)
            self.tickets[event.ticket] = opened
        self.follow(opened, number, event)
        report = self.state.on_source_event if opened.is_source else self.state.on_event
        self.perform(report(opened.assignment, number, event, self.now_s))

    def follow(  # noqa: PLR0912, one arm per event
        self, opened: Opened, number: int, event: SequenceEvent
    ) -> None:
        """What a worker that says so has become."""
        match event:
            case Offered():
                opened.stage = "offered"
            case LocalPrefill():
                opened.stage = "computing"
            case Prefilled() if opened.is_source and opened.is_search:
                opened.stage = "sending"
            case Prefilled():
                opened.stage = "running"
            case Tokens():
                opened.at[number] += len(event.samples)
                opened.forked = opened.forked or not opened.is_source
                if event.finish is not FinishReason.NONE:
                    opened.ended.add(number)
                elif opened.is_source:
                    opened.ended.add(number)  # it has said all that it has to say of this one
                if opened.is_source and not opened.live:
                    self.source_goes_on(opened)
            case Committed():
                opened.stage, opened.forked = "running", not opened.is_search
            case Paused():
                opened.stage = "paused"
            case NotHandedOff() if not opened.is_source:
                opened.stage = "paused"
            case Failed() | Preempted() | Deferred() if opened.forked and not opened.is_source:
                opened.ended.add(number)
            case Failed() | Preempted() | Deferred() | HandedOff() | NotHandedOff():
                opened.stage = "over"
                opened.ended.update(range(len(opened.outputs)))

    @staticmethod
    def source_goes_on(opened: Opened) -> None:
        has_more = any(opened.at[n] < len(o) for n, o in enumerate(opened.outputs))
        opened.stage = "sending" if has_more else "over"
        opened.ended = set() if has_more else opened.ended

    def place(self, assignment: Assignment) -> None:
        self.waiting.remove(assignment)
        workers = self.fleet.workers
        prefill = workers[self.rng.choice("pq")] if self.rng.random() < 0.7 else None
        decode = workers[self.rng.choice("de")]
        num = len(assignment.choices)
        if prefill is not None and self.rng.random() < 0.1:
            decode = prefill  # which runs it to its end
        placement = Placement(self.fleet, len(self.placements), prefill, decode, 5, 2, num)
        self.placements.append(placement)
        self.perform(self.state.on_place(assignment, placement, self.now_s))

    def migrate(self, choice: Choice) -> None:
        worker = self.fleet.workers[self.rng.choice("de")]
        placement = Placement(self.fleet, len(self.placements), None, worker, 1, 1)
        self.placements.append(placement)
        self.migrations.append(choice)
        self.perform(self.state.on_migration(choice, placement, self.now_s))

    def fire(self, assignment: Assignment) -> None:
        self.now_s = max(self.now_s, self.timers.pop(assignment))
        self.perform(self.state.on_timer(assignment, self.now_s))

    def deliver(self, choice: Choice) -> None:
        self.perform(self.state.on_delivery(choice))
        self.news.pop(choice, None)
        piece = choice.output.take()
        if piece is not None:
            sent = self.sent[choice.index]
            assert choice.index not in self.finished, "nothing follows the end"
            assert piece.token_index == len(sent)
            sent += [sample.token_id for sample in piece.samples]
            if piece.finish is not FinishReason.NONE:
                self.finished.add(choice.index)

    # What must be so

    def check_deadlines(self) -> None:
        """What waits for one worker's answer has a timer; all else, the request's deadline."""
        for assignment in self.state._assignments:
            placement = assignment.placement
            match assignment.state:
                case State.PAUSING | State.RETURNING:
                    assert assignment in self.timers
                case State.RESERVING:
                    assert placement is not None
                    is_answered_at_once = placement.owner.tier is Tier.DECODE
                    assert (assignment in self.timers) == is_answered_at_once
                case State.DELIVERING:
                    assert (assignment in self.timers) != assignment.is_prefill_awaited
                case _:
                    assert assignment not in self.timers

    def check_output(self) -> None:
        for choice, sent in zip(self.state.choices, self.sent, strict=True):
            whole = expected_output(self.spec.choice_alone(choice.index))
            assert sent == whole[: len(sent)]
            if choice.index in self.finished and choice.output._stop is None:
                assert sent == whole

    def check_empty(self) -> None:
        assert not self.state._assignments
        assert not self.waiting
        assert not self.timers
        assert not self.migrations
        assert all(not opened.live or opened.stage == "over" for opened in self.opened)
        for placement in self.placements:
            assert placement._num_sequences == placement._prefill_tokens == 0
        for worker in self.fleet.workers.values():
            assert worker.num_in_flight == worker.outstanding_tokens == 0
            assert not worker.unreported_blocks


def live_through(rig: Rig, num_steps: int) -> None:
    """Until the request has ended, or for so many steps; then it is given up."""
    rig.perform(rig.state.on_start(0.0))
    for _ in range(num_steps):
        if not rig.state.num_running and not rig.news:
            break
        rig.now_s += 0.001
        steps = list(rig.steps())
        if steps:
            rig.rng.choice(steps)()
    rig.perform(rig.state.on_close())


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "block",
    [*range(5), *(pytest.param(block, marks=pytest.mark.slow) for block in range(5, 20))],
)
def test_whatever_the_order_of_events(block: int) -> None:
    num_whole = 0
    for seed in range(100 * block, 100 * block + 100):
        rig = Rig(seed)
        try:
            live_through(rig, 20 if seed % 5 == 0 else 2000)
            rig.check_output()
            rig.check_empty()
            if seed % 5 and rig.error is None:
                assert len(rig.finished) == rig.spec.num_choices, "stuck"
                num_whole += 1
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    assert num_whole > 20
