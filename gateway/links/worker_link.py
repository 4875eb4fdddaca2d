"""What the gateway needs of a worker, of either tier, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.commands import SequenceCommand
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

    def send(self, handle: int, command: SequenceCommand) -> None:
        """Command a sequence. The sink of an aborted one is called no more; to abort one that has
        ended is ignored."""
        ...
