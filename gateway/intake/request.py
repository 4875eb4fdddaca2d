"""A request that passed the validator: what its driver needs, and nothing that could still be
wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.types import SequenceSpec


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
    """One request."""

    spec: SequenceSpec
    """Of all its choices together; the outputs of a beam search are its choices, too."""
    text: TextOptions
    num_returned: int = 1
    """Choices sent to the client: all, or the best of them."""
    echo_text: str | None = None
    """What the text of each output begins with: the prompt's, if it was asked for."""
    account: bytes = b""
    """Whose it is: accounts share the queue by their weights."""
    resume_from: Mapping[int, ChoiceSoFar] = field(default_factory=dict)
    """By choice, what is not to be sent again."""
