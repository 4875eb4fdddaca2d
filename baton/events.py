"""What a decode worker tells the gateway about one sequence. Events of a sequence are ordered; the last one is
Deferred, Preempted, Failed, or Tokens with a finish reason, and nothing follows it."""

from __future__ import annotations

from dataclasses import dataclass

from baton.types import FinishReason, Sample


@dataclass(frozen=True, slots=True)
class Offered:
    """Room is reserved; `ticket` (a serialised KvTicket) is for the prefill worker, opaque to the gateway."""

    ticket: bytes
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillsHere:
    """No ticket is needed: the decode worker computes what it lacks."""

    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Deferred:
    """No room now. Nothing is kept; open again when the load report shows room."""

    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The KV arrived whole, and the sequence runs. Tokens with its first token follow at once: the gateway has that
    token from the prefill worker as well, whichever is faster, and merges by index."""

    transfer_exposed_ms: float
    transfer_bytes: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """Others needed the memory: the sequence is gone from the worker and may be placed anew with its tokens so far."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence is gone from the worker. `reason` is one of baton.errors.BY_REASON."""

    reason: str
    message: str
    is_retriable: bool


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens at output indices token_index, token_index + 1, ..."""

    token_index: int
    samples: tuple[Sample, ...]
    finish: FinishReason = FinishReason.NONE


DecodeEvent = Offered | PrefillsHere | Deferred | Committed | Preempted | Failed | Tokens

#: (handle of the sequence in its stream, what happened to it)
AddressedEvent = tuple[int, DecodeEvent]


def is_last(event: DecodeEvent) -> bool:
    """Whether nothing follows this event for its sequence."""
    if isinstance(event, Tokens):
        return event.finish is not FinishReason.NONE
    return isinstance(event, Deferred | Preempted | Failed)
