"""Signs of life of an engine loop, and how long its silence may last before it is believed to stand
still.

Within a step the loop is silent from one group of layers to the next: for milliseconds on a GPU,
for seconds where a large model computes a long chunk on a CPU. No one number fits all, so each
worker goes by its own: the bound is MARGIN times the longest silence that it has shown lately, more
where a step has more tokens than any of these had, and never less than what its options say.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

#: How much longer than the longest one expected a silence may last: the machine may be busy with
#: other things.
MARGIN = 4.0

#: Bound of a worker that has computed nothing yet, in seconds: kernels are compiled and memory is
#: touched first.
FIRST_STEP_S = 60.0

#: Lately is the last one to two spans of so much silence in steps, in seconds. Time without work
#: forgets nothing.
SPAN_S = 60.0


@dataclass(frozen=True, slots=True)
class _Span:
    """What was seen in it. most_tokens: of a step; 0 if none was computed."""

    longest_s: float = 0.0
    most_tokens: int = 0
    total_s: float = 0.0


class SilenceBound:
    """Pure: silences in, the bound out. Written by one thread; another may ask."""

    def __init__(self, least_s: float) -> None:
        """least_s: what the bound never falls below."""
        self._least_s = least_s
        self._last, self._now = _Span(), _Span()

    def observe(self, num_tokens: int, silence_s: float) -> None:
        """A silence has ended. num_tokens: new tokens of the step that it was part of; 0 between
        steps."""
        span = self._now
        self._now = _Span(
            max(span.longest_s, silence_s),
            max(span.most_tokens, num_tokens),
            span.total_s + (silence_s if num_tokens else 0.0),
        )
        if self._now.total_s >= SPAN_S:
            self._last, self._now = self._now, _Span()

    def bound_s(self, num_tokens: int) -> float:
        """How long a silence in a step of so many tokens may last.

        Time grows with the tokens at most in proportion, as each step costs something whatever its
        size.
        """
        last, now = self._last, self._now
        most_tokens = max(last.most_tokens, now.most_tokens)
        if num_tokens and not most_tokens:
            return max(self._least_s, FIRST_STEP_S)
        growth = max(1.0, num_tokens / most_tokens) if num_tokens else 1.0
        return max(self._least_s, MARGIN * max(last.longest_s, now.longest_s) * growth)


class Heartbeat:
    """When the engine loop last showed a sign of life. Beaten by its thread, before and after every
    step and within it at every group of layers; read by any."""

    def __init__(self, stall_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """stall_timeout_s: least silence that is believed to be a standstill."""
        self._clock = clock
        self._silences = SilenceBound(stall_timeout_s)
        self._beat_s = clock()
        self._num_tokens = 0

    def beat(self, num_tokens: int = 0) -> None:
        """Show life. num_tokens: new tokens of the step that goes on now; 0 if none does."""
        now_s = self._clock()
        self._silences.observe(self._num_tokens, now_s - self._beat_s)
        self._num_tokens = num_tokens
        self._beat_s = now_s

    @property
    def age_s(self) -> float:
        """Seconds since the last beat."""
        return self._clock() - self._beat_s

    @property
    def max_age_s(self) -> float:
        """Age up to which the loop is believed to be at work, in seconds."""
        return self._silences.bound_s(self._num_tokens)
