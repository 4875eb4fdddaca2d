"""What the gateway needs of a worker, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.events import DecodeEvent
from baton.types import FinishReason, KvSource, Sample, SequenceSpec, TokenLogprobs

#: Takes the events of one sequence, in order; called in the event loop, never by `open` itself; quick, raises nothing.
Sink = Callable[[DecodeEvent], None]


@dataclass(frozen=True, slots=True)
class First:
    """The first token of one choice. finish: whether it ends the choice."""

    sample: Sample
    finish: FinishReason = FinishReason.NONE


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prefill worker's answer: the first tokens, and how they came about.

    firsts: of each choice in their order; in a beam search one, for the decode worker alone.
    prompt_logprobs: of the prompt's tokens but the first, if they were asked for.
    """

    firsts: tuple[First, ...]
    num_cached_tokens: int
    queue_ms: float
    compute_ms: float
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


#: Takes a prefill worker's answer; as Sink.
OnFirst = Callable[[PrefillResult], None]


class PrefillLink(Protocol):
    """A way to one prefill worker."""

    async def prefill(
        self, spec: SequenceSpec, ticket: bytes, timeout_s: float, on_first: OnFirst
    ) -> None:
        """Compute the tokens of `spec`, give the next token of each choice to `on_first`, and ship all KV to the ticket's
        owner (none if `ticket` is empty): returns when the owner has it. Cancelling the coroutine cancels the work.

        Raises BatonError, before `on_first` was called or after it; WorkerLost if the worker went away, HandoffFailed if the
        KV cannot be delivered.
        """
        ...


class DecodeLink(Protocol):
    """A way to one decode worker.

    When the worker is lost, its owner takes it out of the fleet first and tells the sinks then: who is told looks for
    another place at once, and must not find this one.
    """

    def open(self, spec: SequenceSpec, source: KvSource, sinks: Sequence[Sink]) -> int:
        """Ask for room for `spec`. Returns a handle, the first of as many as there are sinks, one for each output.

        Until the outputs part, all that becomes of them goes to the first sink; from then on what becomes of an output
        goes to its own. Only the loss of the worker is told to all in any case:
        Failed("WORKER_LOST", ..., is_retriable=True).
        """
        ...

    def abort(self, handle: int) -> None:
        """End the sequence in whatever state it is; its sink is called no more. Handles of ended ones are ignored.

        Before the outputs part, the sequence goes on for those that were not aborted, but what becomes of it is told to
        the first handle's sink alone: abort that one no sooner than they part, or with all the others.
        """
        ...

    def pause(self, handle: int) -> None:
        """Stop a running sequence where it is; Paused follows its last tokens. Ignored if it is not there any more."""
        ...

    def hand_off(self, handle: int, ticket: bytes) -> None:
        """Have a paused sequence's KV sent to the ticket's owner: HandedOff or HandOffFailed answers."""
        ...

    def resume(self, handle: int) -> None:
        """Let a paused sequence go on."""
        ...
