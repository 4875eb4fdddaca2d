"""One of the outputs of a request, wherever it is placed."""

from __future__ import annotations

from collections.abc import Iterable

from baton.errors import BatonError, HandoffFailed
from baton.events import Deferred, HandedOff, HandOffFailed, Paused, Preempted, Tokens, joined
from baton.types import FinishReason
from gateway.output import Output

#: Why a choice has no place any more: no room after all, others needed it, or an error.
Left = Deferred | Preempted | BatonError

#: What comes to a choice that has a place; nothing follows a Left.
ChoiceEvent = Tokens | Left

#: What a decode worker tells of it; the rest is about moves to another one.
SeatEvent = ChoiceEvent | Paused | HandedOff | HandOffFailed

#: Failures of workers that one choice outlives; preemptions and deferrals are not counted.
MAX_FAILURES = 3


class Choice:
    """index: among the request's outputs."""

    def __init__(self, index: int, output: Output) -> None:
        self.index = index
        self.output = output
        self.failures: list[BatonError] = []
        self.avoid: frozenset[str] = frozenset()
        """Addresses of workers that failed it."""
        self.unreached: frozenset[str] = frozenset()
        """Addresses of decode workers that its KV did not get to."""

    @property
    def is_over(self) -> bool:
        return self.output.finish is not FinishReason.NONE

    def take(self, events: Iterable[ChoiceEvent]) -> Left | None:
        """Add the tokens, up to the output's end; tell why there will be no more from where these came.

        Tokens of several steps are added as one: what a piece of text costs, it costs once.
        Raises EngineFault if they do not follow those known.
        """
        for event in joined(events):
            if not isinstance(event, Tokens):
                return event
            self.output.add(event.token_index, event.samples, event.finish, event.score)
            if self.is_over:
                break
        return None

    def note_failure(self, error: BatonError, prefill: str, decode: str) -> None:
        """Count a failure that another try may mend, better elsewhere. Raises the last one too many.

        prefill, decode: addresses of the workers; empty for none."""
        self.failures.append(error)
        if len(self.failures) > MAX_FAILURES:
            raise error
        self.avoid |= {prefill, decode} - {""}
        if isinstance(error, HandoffFailed) and prefill:
            self.unreached |= {decode}
