"""What the prefill core is told, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass

from baton.cache.ledger import ListBlocks
from baton.errors import BatonError
from baton.types import FinishReason, Sample, SequenceSpec, TokenLogprobs
from kv_transfer.sender import SendDone
from kv_transfer.ticket import TicketEvent
from prefill_svc.job import ChunkTime


@dataclass(frozen=True, slots=True)
class Submit:
    """A prompt to compute. `key` is unique in this worker. `ticket`: where its KV goes; empty for nowhere.

    The ticket has been presented by then, under the same key: its owner waits for that no longer than this worker's step."""

    key: str
    spec: SequenceSpec
    ticket: bytes
    num_held_tokens: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The gateway gave the prompt up, in whatever stage it is."""

    key: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more prompts."""


PrefillCommand = Submit | Abort | Drain | SendDone | TicketEvent | ListBlocks


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of one choice, and whether it ends it."""

    sample: Sample
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is computed. Times in seconds: in the queue, and from the first chunk to the first tokens.

    firsts: one for each choice. prompt_logprobs: of the prompt's tokens but the first, if they were asked for.
    """

    key: str
    firsts: tuple[FirstToken, ...]
    num_cached_tokens: int
    num_borrowed_tokens: int
    queue_s: float
    compute_s: float
    chunks: tuple[ChunkTime, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether no choice goes on."""
        return all(first.finish is not FinishReason.NONE for first in self.firsts)


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The prompt will have no first token from here."""

    key: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """The handoff of a prompt that goes on elsewhere, after Prefilled. No error: the ticket's owner has all KV."""

    key: str
    error: BatonError | None


PrefillEvent = Prefilled | PrefillFailed | HandoffEnded
