"""The outputs of one request, the workers that they are given to, and what is to be done about it.

The reducer in state.py alone writes choices and assignments, and returns actions; the driver
carries the actions out, in this order, and reports what comes of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.commands import SequenceCommand
from baton.errors import BatonError, HandoffFailed
from baton.events import Deferred, Preempted, Tokens
from baton.types import KvSource, SequenceSpec
from gateway.links.worker_link import WorkerLink
from gateway.output.output import ChoiceOutput
from gateway.routing.fleet import Worker
from gateway.routing.placement import Outcome, Placement
from gateway.routing.router import Need

#: Why a worker has let go of a sequence: no room after all, others needed it, or an error.
Released = Deferred | Preempted | BatonError

#: Failures of workers that one choice outlives; preemptions and refusals are not counted.
MAX_FAILURES = 3


class State(enum.Enum):
    """Of an assignment; drawn in state.py. Each has a deadline: its own, or the request's."""

    WAITING = enum.auto()
    """In the queue. The request's deadline."""
    PAUSING = enum.auto()
    """A migration: the worker that runs the sequence was asked to pause it. PAUSE_TIMEOUT_S."""
    RESERVING = enum.auto()
    """Opened at its owner. Deadline: OPEN_TIMEOUT_S; the request's own at an owner with a queue."""
    DELIVERING = enum.auto()
    """The source has the ticket. Once all KV is computed HANDOFF_TIMEOUT_S, until then the
    request's deadline."""
    RUNNING = enum.auto()
    """The owner has the KV, or computes it. The request's deadline."""
    RETURNING = enum.auto()
    """A migration that failed at its new owner; whether the old one still has the sequence is not
    known yet. What is left of HANDOFF_TIMEOUT_S."""
    OVER = enum.auto()
    """Nothing is held on any worker."""


@dataclass(slots=True, eq=False)
class Choice:
    """One output. index: among the request's."""

    index: int
    output: ChoiceOutput
    is_over: bool = False
    """Whether it has ended, and holds nothing on any worker."""
    pending: list[Tokens] = field(default_factory=list)
    """What came and is not in `output` yet: what a piece of text costs, it costs once, however many
    steps it is of."""
    assignment: Assignment | None = None
    """Where its tokens come from."""
    migration: Assignment | None = None
    """Where they will come from, while it is being moved."""
    failures: list[BatonError] = field(default_factory=list)
    avoid: frozenset[str] = frozenset()
    """Addresses of workers that failed it."""
    unreached: frozenset[str] = frozenset()
    """Addresses of workers that its KV did not get to."""

    def note_failure(self, error: BatonError, placement: Placement) -> bool:
        """Count a failure that another try may mend, better elsewhere. Whether it was one too
        many."""
        self.failures.append(error)
        workers = {worker.address for worker in (placement.owner, placement.source) if worker}
        self.avoid |= workers
        if isinstance(error, HandoffFailed) and placement.source:
            self.unreached |= {placement.owner.address}
        return len(self.failures) > MAX_FAILURES


@dataclass(slots=True, eq=False)
class Assignment:
    """Choices that are one sequence until they fork, and the workers that they were given to, or
    wait for.

    choices: in the order of their handles; a choice's place among them is its number here.
    spec: what is opened; of a migration, with the tokens so far once it is paused.
    origin: of a migration, where the one choice runs until its KV is here.
    """

    choices: tuple[Choice, ...]
    state: State
    since_s: float
    """When it came into its state."""
    spec: SequenceSpec
    origin: Assignment | None = None
    placement: Placement | None = None
    gone: set[int] = field(default_factory=set)
    """Numbers of the choices that have ended, or go on elsewhere."""
    is_forked: bool = False
    """Whether each choice runs under its own handle at the owner."""
    is_prefill_awaited: bool = False
    """Whether the source has the prompt, and has not said yet that it is computed."""
    is_streaming: bool = False
    """Whether tokens pass at once: nothing has to come before them."""
    held: list[tuple[int, Tokens | Released]] = field(default_factory=list)
    """Events of the owner, by number, that wait for the source's event or for the other outputs of
    a search."""
    has_origin_left: bool = False
    """Whether the origin has handed the sequence off."""
    failure: Released | None = None
    """Of a migration that is RETURNING: why it failed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Find workers for a waiting assignment. is_return: the request had some before."""

    assignment: Assignment
    need: Need
    is_return: bool


@dataclass(frozen=True, slots=True)
class Open:
    """Open an assignment's sequence at the owner of its place, which gets the KV from `source`."""

    assignment: Assignment
    placement: Placement
    source: KvSource


@dataclass(frozen=True, slots=True)
class OpenSource:
    """Open it at its source as well, with the owner's ticket."""

    assignment: Assignment
    link: WorkerLink
    ticket: bytes


@dataclass(frozen=True, slots=True)
class SendCommand:
    """Send a command to a choice's owner; the choice by its number in the assignment."""

    assignment: Assignment
    number: int
    command: SequenceCommand


@dataclass(frozen=True, slots=True)
class AbortSource:
    """End the sequence at the source."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Close:
    """Give back all that an assignment holds: its place in the queue or its claim on workers, its
    sequences, its timer."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Report to the assignment in `delay_s`, in place of any earlier order; None: do not report."""

    assignment: Assignment
    delay_s: float | None


@dataclass(frozen=True, slots=True)
class Update:
    """Record what became of a placement."""

    placement: Placement
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class NoteUndelivered:
    """Record that `sender` could not deliver KV to the placement's owner."""

    placement: Placement
    sender: Worker
    why: str


@dataclass(frozen=True, slots=True)
class Remember:
    """`worker` has the KV of all tokens of `spec`."""

    worker: Worker
    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class EndMigration:
    """Report to whoever ordered a choice's migration that it is over, wherever the choice is
    now."""

    choice: Choice


@dataclass(frozen=True, slots=True, eq=False)
class Deliver:
    """A choice has something new for the client, or has ended."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request with an error, after what is there was delivered."""

    error: BatonError


Action = (
    Place
    | Open
    | OpenSource
    | SendCommand
    | AbortSource
    | Close
    | SetTimer
    | Update
    | NoteUndelivered
    | Remember
    | EndMigration
    | Deliver
    | Fail
)
