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
    """One request. arrival_s: on the event loop's clock. tokenize_ms: rendering and tokenizing."""

    spec: SequenceSpec
    """Of all its choices together; the outputs of a beam search are its choices, too."""
    text: TextOptions
    arrival_s: float
    tokenize_ms: float = 0.0
    num_returned: int = 1
    """Choices told to the client: all, or the best of them."""
    echo_text: str | None = None
    """What the text of each output begins with: the prompt's, if it was asked for."""

    @property
    def is_best_of(self) -> bool:
        """Whether not all choices are told."""
        return self.num_returned < self.spec.num_choices
