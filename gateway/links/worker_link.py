"""What the gateway needs of a worker, of either tier, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.events import SequenceEvent
from baton.types import KvSource, SequenceSpec

#: Takes the events of one sequence, in order; called in the event loop, never by `open` itself;
#: quick, raises nothing.
Sink = Callable[[SequenceEvent], None]


class WorkerLink(Protocol):
    """A way to one worker.

    When the worker is lost, its owner takes it out of the fleet first and reports to the sinks
    then: whoever gets the event looks for another place at once, and must not find this one.
    """

    def open(
        self, spec: SequenceSpec, source: KvSource, sinks: Sequence[Sink], send_to: bytes = b""
    ) -> int:
        """Ask for room for `spec`. Returns a handle, the first of as many as there are sinks, one
        for each output.

        send_to: a ticket of the worker that the sequence leaves for with its first tokens; it stays
        here if it is empty. Until the outputs fork, all that becomes of them goes to the first
        sink; from then on what becomes of an output goes to its own. Only the loss of the worker is
        reported to all in any case: Failed("WORKER_LOST", ..., is_retriable=True).
        """
        ...

    def abort(self, handle: int) -> None:
        """End the sequence in whatever state it is; its sink is called no more. Handles of ended
        ones are ignored.

        Before the outputs fork, the sequence goes on for those that were not aborted, but what
        becomes of it is reported to the first handle's sink alone: abort that one no sooner than
        they fork, or with all the others.
        """
        ...

    def pause(self, handle: int) -> None:
        """Stop a running sequence where it is; Paused follows its last tokens. Ignored if it is not
        there any more."""
        ...

    def hand_off(self, handle: int, ticket: bytes) -> None:
        """Have a paused sequence's KV sent to the ticket's owner: HandedOff or NotHandedOff
        answers."""
        ...

    def resume(self, handle: int) -> None:
        """Let a paused sequence go on."""
        ...
