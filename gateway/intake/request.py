"""A request that passed the validator, with everything its driver needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.types import SequenceSpec


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Detokenization options, which the tiers do not use."""

    stop: tuple[str, ...] = ()
    is_stop_included: bool = False
    skip_special_tokens: bool = True
    user_stop_token_ids: frozenset[int] = frozenset()
    """Stop tokens that the client named, to report which one ended the output."""


@dataclass(frozen=True, slots=True)
class ChoiceSoFar:
    """Output of one choice that the client already has from an earlier stream. num_chars:
    characters of its text, the echoed prompt included."""

    token_ids: tuple[int, ...]
    num_chars: int
    has_ended: bool


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A valid request."""

    spec: SequenceSpec
    """For all choices together; outputs of a beam search are choices, too."""
    text: TextOptions
    num_returned: int = 1
    """Choices sent to the client: all, or the best of them."""
    echo_text: str | None = None
    """Text before each output: the prompt's, if requested."""
    account: bytes = b""
    """Account of the caller; accounts share the queue by weight."""
    resume_from: Mapping[int, ChoiceSoFar] = field(default_factory=dict)
    """By choice: output that is not sent again."""
