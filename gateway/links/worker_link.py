"""The gateway's interface to a worker of either tier, independent of the transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.commands import SequenceCommand
from baton.events import SequenceEvent
from baton.types import KvSource, SequenceSpec

#: Receives the events of one sequence, in order, on the event loop; never called by `open` itself.
#: Must be quick and raise nothing.
Sink = Callable[[SequenceEvent], None]


class WorkerLink(Protocol):
    """A link to one worker.

    When the worker is lost, the owner removes it from the fleet before it notifies the sinks,
    because they request another placement at once and must not get this worker.
    """

    def open(
        self, spec: SequenceSpec, source: KvSource, sinks: Sequence[Sink], send_to: bytes = b""
    ) -> int:
        """Open `spec`. Return the first of consecutive handles, one per sink; one sink per output.

        send_to: ticket of the worker that takes the sequence over after its first tokens; empty if
        it stays here.
        Until the outputs fork, all events go to the first sink; then each output's events go to its
        own sink. The loss of the worker is always reported to all sinks: Failed("WORKER_LOST", ...,
        is_retriable=True).
        """
        ...

    def send(self, handle: int, command: SequenceCommand) -> None:
        """Send a command to a sequence. After an abort its sink is not called again; aborting an
        ended sequence is ignored."""
        ...
