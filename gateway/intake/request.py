"""A request that passed the validator: what its driver needs, and nothing that could still be
wrong; and its name."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from baton.rpc.status import REQUEST_ID_KEY
from baton.types import SequenceSpec

_VALID_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_SUFFIX_BYTES = 6


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the output becomes text; the tiers know nothing of it."""

    stop: tuple[str, ...] = ()
    is_stop_included: bool = False
    skip_special_tokens: bool = True
    user_stop_token_ids: frozenset[int] = frozenset()
    """Those of the sequence's stop tokens that the client named, by which it is known what ended
    it."""


@dataclass(frozen=True, slots=True)
class ChoiceSoFar:
    """What the client has of one choice from an earlier stream of the request. num_chars: of its
    text, the echoed prompt included."""

    token_ids: tuple[int, ...]
    num_chars: int
    has_ended: bool


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """One request. arrival_s: on the event loop's clock. tokenize_ms: rendering and tokenizing."""

    spec: SequenceSpec
    """Of all its choices together; the outputs of a beam search are its choices, too."""
    text: TextOptions
    arrival_s: float
    tokenize_ms: float = 0.0
    num_returned: int = 1
    """Choices sent to the client: all, or the best of them."""
    echo_text: str | None = None
    """What the text of each output begins with: the prompt's, if it was asked for."""
    account: bytes = b""
    """Whose it is: accounts share the queue alike."""
    resume_from: Mapping[int, ChoiceSoFar] = field(default_factory=dict)
    """By choice, what is not to be sent again."""

    @property
    def is_best_of(self) -> bool:
        """Whether not all choices are sent."""
        return self.num_returned < self.spec.num_choices


def unique_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The caller's x-request-id, if it gave one that is valid, or a fresh name; with a suffix that
    makes it unique.

    Two requests of one name never meet in a queue, a cache or a ticket.
    """
    given = next((value for key, value in metadata or () if key == REQUEST_ID_KEY), "")
    suffix = secrets.token_hex(_SUFFIX_BYTES)
    if isinstance(given, str) and _VALID_ID.fullmatch(given):
        return f"{given}-{suffix}"
    return f"req-{suffix}"
