"""What the gateway needs of a worker, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.events import DecodeEvent
from baton.types import FinishReason, Sample, SequenceSpec

#: Takes the events of one sequence, in order; called in the event loop, never by `open` itself; quick, raises nothing.
Sink = Callable[[DecodeEvent], None]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prefill worker's answer: the first token, and how it came about."""

    sample: Sample
    finish: FinishReason
    num_cached_tokens: int
    queue_ms: float
    compute_ms: float


class PrefillLink(Protocol):
    """A way to one prefill worker."""

    async def prefill(self, spec: SequenceSpec, ticket: bytes, timeout_s: float) -> PrefillResult:
        """Compute the tokens of `spec`, ship their KV to the ticket's owner (none if `ticket` is empty), and give the
        next token. Cancelling the coroutine cancels the work.

        Raises BatonError; WorkerLost if the worker went away.
        """
        ...


class DecodeLink(Protocol):
    """A way to one decode worker.

    When the worker is lost, its owner takes it out of the fleet first and tells the sinks then: who is told looks for
    another place at once, and must not find this one.
    """

    def open(self, spec: SequenceSpec, prefill_here: bool, sink: Sink) -> int:
        """Ask for room for `spec`. All that becomes of it goes to `sink`, the loss of the worker too:
        Failed("WORKER_LOST", ..., is_retriable=True). Returns a handle for `abort`."""
        ...

    def abort(self, handle: int) -> None:
        """End the sequence in whatever state it is; its sink is called no more. Handles of ended ones are ignored."""
        ...
