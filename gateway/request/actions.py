"""What the reducer of a request's life wants done. The driver does it, in this order, and reports
what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import BatonError
from baton.types import KvSource, NumericsClass, SequenceSpec
from gateway.routing.fleet import Worker
from gateway.routing.placement import Outcome, Placement

if TYPE_CHECKING:
    from gateway.request.assignment import Assignment, Choice


@dataclass(frozen=True, slots=True)
class Place:
    """Find workers for a waiting assignment. is_return: the request had some before. The rest: see
    Need."""

    assignment: Assignment
    is_return: bool
    avoid: frozenset[str]
    unreached: frozenset[str]
    numerics: NumericsClass | None


@dataclass(frozen=True, slots=True)
class Open:
    """Open an assignment's sequence at its home, which gets the KV from `source`."""

    assignment: Assignment
    source: KvSource


@dataclass(frozen=True, slots=True)
class OpenSource:
    """Open it at its source as well, with the home's ticket."""

    assignment: Assignment
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause a choice at its home; as the next three, by its number in the assignment."""

    assignment: Assignment
    number: int


@dataclass(frozen=True, slots=True)
class HandOff:
    """Have a paused choice's KV sent to the ticket's owner."""

    assignment: Assignment
    number: int
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Resume:
    """Let a paused choice go on at its home."""

    assignment: Assignment
    number: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End one choice at its home; others go on there."""

    assignment: Assignment
    number: int


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
    """Report to the assignment in `delay_s`, in place of any earlier order."""

    assignment: Assignment
    delay_s: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Do not report."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Update:
    """Record what became of a placement."""

    placement: Placement
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class NoteUndelivered:
    """Record that `sender` could not deliver KV to the placement's home."""

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
    | Pause
    | HandOff
    | Resume
    | Abort
    | AbortSource
    | Close
    | SetTimer
    | CancelTimer
    | Update
    | NoteUndelivered
    | Remember
    | EndMigration
    | Deliver
    | Fail
)
