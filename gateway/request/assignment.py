"""Choices of a request, their assignments to workers, and the actions of the reducer.

Only the reducer in state.py writes choices and assignments. The driver carries its actions out in
order, and feeds the results back as events.
"""

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

#: Why a worker released a sequence: no room, preempted, or an error.
Released = Deferred | Preempted | BatonError

#: Maximum worker failures per choice; preemptions and refusals do not count.
MAX_FAILURES = 3


class State(enum.Enum):
    """State of an assignment, drawn in state.py. Each value names its deadline."""

    WAITING = enum.auto()
    """In the queue. Deadline: the request's."""
    PAUSING = enum.auto()
    """Migration: its worker was asked to pause the sequence. Deadline: PAUSE_TIMEOUT_S."""
    RESERVING = enum.auto()
    """Opened at its owner. Deadline: OPEN_TIMEOUT_S, or the request's if the owner has a queue."""
    DELIVERING = enum.auto()
    """The source has the ticket. Deadline: the request's until all KV is computed, then
    HANDOFF_TIMEOUT_S."""
    RUNNING = enum.auto()
    """The owner holds the KV, or computes it. Deadline: the request's."""
    RETURNING = enum.auto()
    """A migration failed at its target; whether the origin still holds the sequence is not known
    yet. Deadline: the rest of HANDOFF_TIMEOUT_S."""
    OVER = enum.auto()
    """No worker holds anything."""


@dataclass(slots=True, eq=False)
class Choice:
    """One output of the request. index: its number there."""

    index: int
    output: ChoiceOutput
    is_over: bool = False
    """Whether it has ended, with nothing left on any worker."""
    pending: list[Tokens] = field(default_factory=list)
    """Tokens that are not in `output` yet. They are added together, so that the cost of text is
    paid per piece, not per step."""
    assignment: Assignment | None = None
    """Current source of its tokens."""
    migration: Assignment | None = None
    """Next source of its tokens during a migration."""
    failures: list[BatonError] = field(default_factory=list)
    avoid: frozenset[str] = frozenset()
    """Addresses of workers that failed this choice."""
    unreached: frozenset[str] = frozenset()
    """Addresses of workers that its KV could not be sent to."""

    def note_failure(self, error: BatonError, placement: Placement) -> bool:
        """Count a retriable failure and remember the worker to avoid. Return whether MAX_FAILURES
        is exceeded."""
        self.failures.append(error)
        workers = {worker.address for worker in (placement.owner, placement.source) if worker}
        self.avoid |= workers
        if isinstance(error, HandoffFailed) and placement.source:
            self.unreached |= {placement.owner.address}
        return len(self.failures) > MAX_FAILURES


@dataclass(slots=True, eq=False)
class Assignment:
    """Choices that form one sequence until they fork, with the workers assigned to them, if any.

    choices: in the order of their handles; the index here is the choice's number in events.
    spec: the sequence to open; a migration adds the tokens known once it is paused.
    origin: of a migration, the assignment that runs the choice until its KV has arrived.
    """

    choices: tuple[Choice, ...]
    state: State
    since_s: float
    """Time of the last change of state."""
    spec: SequenceSpec
    origin: Assignment | None = None
    placement: Placement | None = None
    gone: set[int] = field(default_factory=set)
    """Numbers of choices that have ended or moved elsewhere."""
    is_forked: bool = False
    """Whether each choice has a handle of its own at the owner."""
    is_prefill_awaited: bool = False
    """Whether the source has the prompt and has not reported Prefilled."""
    is_streaming: bool = False
    """Whether tokens are passed on at once, with nothing to wait for."""
    held: list[tuple[int, Tokens | Released]] = field(default_factory=list)
    """(number, event) from the owner, held until the source reports, or until the other outputs of
    a beam search end."""
    has_origin_left: bool = False
    """Whether the origin has handed the sequence off."""
    failure: Released | None = None
    """Why a migration in state RETURNING failed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Queue a waiting assignment for workers. is_return: the request was placed before."""

    assignment: Assignment
    need: Need
    is_return: bool


@dataclass(frozen=True, slots=True)
class Open:
    """Open an assignment's sequence at its owner, which gets the KV from `source`."""

    assignment: Assignment
    placement: Placement
    source: KvSource


@dataclass(frozen=True, slots=True)
class OpenSource:
    """Open the sequence at its source, with the owner's ticket."""

    assignment: Assignment
    link: WorkerLink
    ticket: bytes


@dataclass(frozen=True, slots=True)
class SendCommand:
    """Send a command to a choice's owner. number: the choice's index in the assignment."""

    assignment: Assignment
    number: int
    command: SequenceCommand


@dataclass(frozen=True, slots=True)
class AbortSource:
    """End the sequence at its source."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Close:
    """Release all that an assignment holds: its queue entry or claim on workers, its sequences and
    its timer."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Set the assignment's timer to `delay_s`, replacing the former one; None cancels it."""

    assignment: Assignment
    delay_s: float | None


@dataclass(frozen=True, slots=True)
class Update:
    """Record the outcome of a placement."""

    placement: Placement
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class NoteUndelivered:
    """Record that `sender` failed to deliver KV to the placement's owner."""

    placement: Placement
    sender: Worker
    why: str


@dataclass(frozen=True, slots=True)
class Remember:
    """Record that `worker` holds the KV of all tokens of `spec`."""

    worker: Worker
    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class EndMigration:
    """Notify the migrator that a choice's migration has ended, successful or not."""

    choice: Choice


@dataclass(frozen=True, slots=True, eq=False)
class Deliver:
    """A choice has new output, or has ended."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request with an error, after delivering pending output."""

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
