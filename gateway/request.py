"""A request that passed the validator: what the relay needs, and nothing that could still be wrong."""

from __future__ import annotations

from dataclasses import dataclass

from baton.types import SequenceSpec


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the output becomes text; the tiers know nothing of it."""

    stop: tuple[str, ...] = ()
    is_stop_included: bool = False
    skip_special_tokens: bool = True
    user_stop_token_ids: frozenset[int] = frozenset()
    """Those of the sequence's stop tokens that the client named, to tell what ended it."""


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """One request for one choice. arrival_s: on the event loop's clock. tokenize_ms: rendering and tokenizing."""

    spec: SequenceSpec
    text: TextOptions
    arrival_s: float
    tokenize_ms: float = 0.0
