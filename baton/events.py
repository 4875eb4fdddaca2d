"""What a worker reports to the gateway about one sequence. Events of a sequence are ordered; the
last one is Deferred, Preempted, HandedOff, Failed, or Tokens with a finish reason, and nothing
follows it. Events of a sequence of several choices come under its first handle until the choices
are forked, at the first token; each has its own from then on.

    OpenSequence ──> Deferred                                      no room now
                ├──> Offered ──> Committed ──> Tokens ...          the KV comes by the ticket
                └──> LocalPrefill ──> Prefilled, Tokens ...        it is computed here
                                        └── with a destination: ──> HandedOff | NotHandedOff
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

from baton.types import FinishReason, Sample, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Offered:
    """Room is reserved; `ticket` (a serialised KvTicket) is for the worker that sends the KV,
    opaque to the gateway. ticket_id: for the worker's own telemetry; it does not travel."""

    ticket: bytes
    num_cached_tokens: int
    ticket_id: int = 0


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """No ticket is needed: the worker computes what is missing, or has all of it."""

    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """When a step computed a chunk of a prompt, in seconds of the worker's clock."""

    begin_s: float
    end_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The worker has computed the prompt; the first tokens follow. From a sequence's arrival to its
    first chunk took queue_ms, from there to the first token compute_ms.

    prompt_logprobs: of the prompt's tokens but the first; empty unless they were asked for. chunks:
    for the worker's own telemetry; they do not travel.
    """

    num_cached_tokens: int
    num_fetched_tokens: int
    queue_ms: float
    compute_ms: float
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    chunks: tuple[ChunkTime, ...] = ()


@dataclass(frozen=True, slots=True)
class Deferred:
    """No room now. Nothing is kept; open again when the load report shows room."""

    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The KV arrived whole, and the sequence runs. From a prefill worker, Tokens with each choice's
    first token follow at
    once: the gateway has them from the prefill worker as well, whichever is faster, and merges by
    index."""

    transfer_exposed_ms: float
    transfer_bytes: int
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Preempted:
    """Others needed the memory: the sequence is gone from the worker and may be placed anew with
    its tokens so far."""


@dataclass(frozen=True, slots=True)
class Paused:
    """As asked, the sequence stands still after the tokens sent so far, and keeps its blocks."""


@dataclass(frozen=True, slots=True)
class HandedOff:
    """Another worker owns the sequence now."""


@dataclass(frozen=True, slots=True)
class NotHandedOff:
    """The sequence could not be handed off and is still here, paused. `reason` is one of
    baton.errors.BY_REASON."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence is gone from the worker. `reason` is one of baton.errors.BY_REASON."""

    reason: str
    message: str
    is_retriable: bool


class Tokens(NamedTuple):
    """Tokens at output indices token_index, token_index + 1, ... One is made for each sequence in
    each step, so it is of the immutable kind that costs least.

    num_draft_tokens: proposed by speculation to the step that gave these; num_accepted_tokens:
    confirmed by it.
    score: of an output that a beam search found.
    """

    token_index: int
    samples: tuple[Sample, ...]
    finish: FinishReason = FinishReason.NONE
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    score: float | None = None


SequenceEvent = (
    Offered
    | LocalPrefill
    | Prefilled
    | Deferred
    | Committed
    | Preempted
    | Paused
    | HandedOff
    | NotHandedOff
    | Failed
    | Tokens
)

#: (handle of the sequence in its stream, what happened to it)
AddressedEvent = tuple[int, SequenceEvent]

_EventT = TypeVar("_EventT")


def is_last(event: SequenceEvent) -> bool:
    """Whether nothing follows this event for its sequence."""
    if isinstance(event, Tokens):
        return event.finish is not FinishReason.NONE
    return isinstance(event, Deferred | Preempted | HandedOff | Failed)


def joined(events: Iterable[_EventT]) -> Iterator[_EventT | Tokens]:
    """The events of one sequence, with tokens that follow each other in one event, as if one step
    had given them."""
    run: list[Tokens] = []
    end = 0
    for event in (*events, None):
        if run and not (isinstance(event, Tokens) and event.token_index == end):
            yield (
                run[-1]._replace(
                    token_index=run[0].token_index,
                    samples=tuple(chain.from_iterable(tokens.samples for tokens in run)),
                    num_draft_tokens=sum(tokens.num_draft_tokens for tokens in run),
                    num_accepted_tokens=sum(tokens.num_accepted_tokens for tokens in run),
                )
                if len(run) > 1
                else run[0]
            )
            run = []
        if isinstance(event, Tokens):
            run.append(event)
            end = event.token_index + len(event.samples)
        elif event is not None:
            yield event
