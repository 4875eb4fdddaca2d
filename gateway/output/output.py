"""One output as it grows: merges tokens by index, detokenizes them, and finds stop strings. Pure.

Tokens may arrive twice (from the workers before and after a resume, or from both tiers); duplicates
are dropped. A different token at a known index, or a gap, is an internal fault and never reaches
the client.

tokenizers' DecodeStream is not used: it has no flush, waits forever on bytes that never form a
character, and emits characters of a byte-token run that a later byte of the run invalidates
(docs/log.md). Stop-string matches do not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.errors import EngineFault
from baton.types import FinishReason, Sample
from gateway.intake.decoding import BYTE, SILENT, TEXT, Decoding
from gateway.intake.request import TextOptions

_REPLACEMENT = "\ufffd"

#: Minimum tokens of a new window that starts among the newest tokens.
_NUM_CONTEXT = 4

#: Undecided tokens kept before the window is cut inside an apparently endless broken character.
_MAX_WINDOW = 64


class Piece(NamedTuple):
    """New output since the last piece; pieces are contiguous. finish, score: set in the last one. A
    NamedTuple, because one is created per message and it is the cheapest immutable type."""

    token_index: int
    samples: Sequence[Sample]
    text: str
    finish: FinishReason = FinishReason.NONE
    stop: str | None = None
    stop_token_id: int | None = None
    score: float | None = None


class ChoiceOutput:
    """The output of one choice."""

    def __init__(
        self,
        decoding: Decoding,
        options: TextOptions,
        min_tokens: int,
        *,
        is_continuation: bool = False,
    ) -> None:
        """Stop strings are matched in the text after the first `min_tokens` tokens.

        is_continuation: see Detokenizer.
        """
        self._options = options
        self._min_tokens = min_tokens
        self._detokenizer = Detokenizer(decoding, is_continuation=is_continuation)
        self._matcher = (
            StopMatcher(options.stop, is_stop_included=options.is_stop_included)
            if options.stop
            else None
        )
        self.token_ids: list[int] = []
        """All tokens so far."""
        self._samples: list[Sample] = []
        self._text: list[str] = []
        self._num_chars_to_skip = 0
        """Characters of the next text that the client already has."""
        self._stop: str | None = None
        self._score: float | None = None
        self.finish = FinishReason.NONE

    def resume(self, token_ids: Sequence[int], num_chars: int) -> None:
        """Start after tokens that the client has, and after `num_chars` characters of their text.
        Must precede all other calls; may be called repeatedly with consecutive tokens."""
        self._feed([Sample(token_id) for token_id in token_ids], FinishReason.NONE)
        self._samples.clear()
        self._num_chars_to_skip = num_chars

    def add(
        self,
        token_index: int,
        samples: Sequence[Sample],
        finish: FinishReason,
        score: float | None = None,
    ) -> None:
        """Add tokens at token_index, token_index + 1, ...; known ones are skipped. No-op after the
        end.

        score: of the whole output, set with its last tokens. Raises EngineFault on a gap, or on a
        token that differs from the known one.
        """
        num_known = len(self.token_ids) - token_index
        if num_known < 0:
            raise EngineFault(f"tokens {len(self.token_ids)}..{token_index - 1} never came")
        if num_known:
            for index, sample in enumerate(samples[:num_known], start=token_index):
                known = self.token_ids[index]
                if known != sample.token_id:
                    fault = f"token {index} came twice, as {known} and as {sample.token_id}"
                    raise EngineFault(fault)
            samples = samples[num_known:]
        if self.finish is not FinishReason.NONE or (not samples and finish is FinishReason.NONE):
            return
        self._score = score
        self._feed(samples, finish)
        if self.finish is FinishReason.NONE and finish is not FinishReason.NONE:
            self.finish = finish
            # The output has ended: release held-back text.
            text = self._detokenizer.flush()
            if self._matcher is not None:
                match = self._matcher.feed(text)
                self._stop, self.finish = match.stop, FinishReason.STOP if match.stop else finish
                text = match.text + ("" if match.stop else self._matcher.flush())
            self._text.append(text)

    def take(self) -> Piece | None:
        """Return all new output, or None. The last piece carries the finish reason."""
        is_over = self.finish is not FinishReason.NONE
        if not self._samples and not is_over:
            return None
        samples, self._samples = self._samples, []
        text = "".join(self._text)
        self._text.clear()
        if self._num_chars_to_skip:
            skipped, self._num_chars_to_skip = (
                self._num_chars_to_skip,
                max(0, self._num_chars_to_skip - len(text)),
            )
            text = text[skipped:]
        stop_token_id = None
        if self.finish is FinishReason.STOP and self._stop is None and self.token_ids:
            # The client's own stop token, if it ended the output.
            last = self.token_ids[-1]
            stop_token_id = last if last in self._options.user_stop_token_ids else None
        token_index = len(self.token_ids) - len(samples)
        if not is_over:
            return Piece(token_index, samples, text)
        return Piece(
            token_index, samples, text, self.finish, self._stop, stop_token_id, self._score
        )

    def _feed(self, samples: Sequence[Sample], finish: FinishReason) -> None:
        """Add new tokens and their text, up to the token that completes a stop string."""
        token_ids = [sample.token_id for sample in samples]
        num_known = len(self.token_ids)
        # A stop token has no text unless requested.
        num_texts = len(token_ids)
        if finish is FinishReason.STOP and not self._options.is_stop_included:
            num_texts -= 1
        matcher = self._matcher
        num_taken = len(token_ids)
        if matcher is None:
            # Copy only for a stop token, which is rare: this runs per step and sequence.
            has_silent = num_texts < num_taken
            with_text = token_ids[:num_texts] if has_silent else token_ids
            self._text.append(self._detokenizer.feed(with_text))
        else:
            num_free = min(max(0, self._min_tokens - num_known), num_texts)
            self._text.append(self._detokenizer.feed(token_ids[:num_free]))
            num_searched = self._search(matcher, token_ids[num_free:num_texts])
            if self._stop is not None:
                num_taken = num_free + num_searched
        if num_taken < len(token_ids):
            token_ids, samples = token_ids[:num_taken], samples[:num_taken]
        self.token_ids += token_ids
        self._samples += samples

    def _search(self, matcher: StopMatcher, token_ids: list[int]) -> int:
        """Add the text of tokens up to a stop string. Return the number of tokens used."""
        detokenizer_before, matcher_before = self._detokenizer.copy(), matcher.copy()
        match = matcher.feed(self._detokenizer.feed(token_ids))
        self._text.append(match.text)
        if match.stop is None:
            return len(token_ids)
        self._stop, self.finish = match.stop, FinishReason.STOP
        # The stop string is somewhere among several tokens: repeat token by token.
        for num_taken, token_id in enumerate(token_ids, start=1):
            if matcher_before.feed(detokenizer_before.feed([token_id])).stop is not None:
                return num_taken
        return len(token_ids)


def best(outputs: Sequence[Piece], num_returned: int) -> list[Piece]:
    """Return the outputs with the highest mean log probability as score, best first.

    outputs: each complete, in one piece. Ties keep their order. Raises EngineFault if a log
    probability is missing.
    """
    scored = [output._replace(score=_mean_logprob(output)) for output in outputs]
    scored.sort(key=lambda output: -(output.score or 0.0))
    return scored[:num_returned]


def _mean_logprob(output: Piece) -> float:
    logprobs = [sample.logprobs.logprob for sample in output.samples if sample.logprobs]
    if not logprobs or len(logprobs) < len(output.samples):
        raise EngineFault("tokens came without the log probabilities that choose among outputs")
    return math.fsum(logprobs) / len(logprobs)


class Detokenizer:
    """Incremental detokenizer. The pieces and the flush concatenate to the text of all ids, for any
    cut into feeds; the text released after given ids does not depend on the cut either, except in
    broken characters.

    Decodes a window of ids. The window starts at a clean border (where the preceding text ended
    with a whole character), some ids before the new ones, since decoders look to the left. Trailing
    replacement characters may be an incomplete character and are held back, as is a run of byte
    tokens until it ends.
    """

    def __init__(self, decoding: Decoding, *, is_continuation: bool = False) -> None:
        """is_continuation: keep a leading space of the text."""
        self._decoding = decoding
        self._decode = decoding.text_of
        self._window: list[int] = list(decoding.lead) if is_continuation else []
        self._num_context = len(self._window)
        """Number of leading window ids with all text released."""
        self._num_released = len(self._decode(self._window)) if self._window else 0
        """Released characters of the window's text."""
        self._is_whole = True
        """Whether no text of the window is held back."""
        self._open_run: list[int] = []
        """Ids after the window: a run of byte tokens that may continue."""

    def copy(self) -> Detokenizer:
        """A detokenizer in the same state."""
        other = Detokenizer(self._decoding)
        other._window = list(self._window)
        other._open_run = list(self._open_run)
        other._num_context, other._num_released = self._num_context, self._num_released
        other._is_whole = self._is_whole
        return other

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add ids and return the text that they complete."""
        if self._decoding.kinds:
            self._extend(token_ids, self._decoding.kinds)
        else:
            self._window.extend(token_ids)
        text = self._decode(self._window)
        # Byte-token runs that have ended contain no incomplete character.
        whole = text if self._decoding.kinds else text.rstrip(_REPLACEMENT)
        piece = whole[self._num_released :]
        self._is_whole = len(whole) == len(text)
        if not self._is_whole:
            self._num_released = max(self._num_released, len(whole))
            return piece + self._cut_window(text) if len(self._window) > _MAX_WINDOW else piece
        if piece:
            self._begin_window(self._num_context, text)
        elif len(self._window) > _MAX_WINDOW:
            del self._window[self._num_context :]  # they have no text
        return piece

    def flush(self) -> str:
        """Release the rest at the end, including replacement characters of an incomplete
        character."""
        self._window += self._open_run
        is_whole = self._is_whole and not self._open_run
        piece = "" if is_whole else self._decode(self._window)[self._num_released :]
        self._open_run.clear()
        self._window.clear()
        self._num_context = self._num_released = 0
        self._is_whole = True
        return piece

    def _extend(self, token_ids: Sequence[int], kinds: bytes) -> None:
        """Append ids to the window; a byte-token run that may continue goes to `_open_run`."""
        for token_id in token_ids:
            kind = kinds[token_id] if token_id < len(kinds) else SILENT
            if kind == TEXT:
                self._window += self._open_run
                self._open_run.clear()
            if kind == BYTE or self._open_run:
                self._open_run.append(token_id)
            else:
                self._window.append(token_id)

    def _begin_window(self, num_old: int, text: str) -> None:
        """Drop the window's first `num_old` ids, and more if a later border is clean. text: of the
        whole window."""
        window = self._window
        if len(window) - num_old > _NUM_CONTEXT:
            tail = window[-_NUM_CONTEXT:]
            tail_text = self._decode(tail)
            # Ids that decode to whole characters alone start at a character.
            if tail_text and _REPLACEMENT not in tail_text and text.endswith(tail_text):
                self._window, self._num_context = tail, _NUM_CONTEXT
                self._num_released = len(tail_text)
                return
        if num_old:
            del window[:num_old]
        self._num_context = len(window)
        if num_old:
            text = (
                self._decoding.text_of_one((window[0],))
                if len(window) == 1
                else self._decode(window)
            )
        self._num_released = len(text)

    def _cut_window(self, text: str) -> str:
        """Release the front of a window of broken characters, at a cut that does not change the
        text."""
        for num_kept in range(4, 12):
            head, tail = self._window[:-num_kept], self._window[-num_kept:]
            head_text = self._decode(head)
            if head_text and head_text + self._decode(tail) == text:
                piece = head_text[self._num_released :]
                self._window = tail
                self._num_released = max(0, self._num_released - len(head_text))
                self._num_context = 0
                return piece
        return ""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Result of a feed. text: released. stop: the stop string found, or None."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds stop strings; holds back the longest suffix of the text that may still become one.

    The earliest end wins; for equal ends, the earliest start.
    """

    def __init__(self, stops: Sequence[str], *, is_stop_included: bool) -> None:
        """stops: at least one, none empty."""
        self._stops = tuple(stops)
        self._is_stop_included = is_stop_included
        self._longest = max(map(len, stops))
        self._held = ""

    def copy(self) -> StopMatcher:
        """A matcher in the same state."""
        other = StopMatcher(self._stops, is_stop_included=self._is_stop_included)
        other._held = self._held
        return other

    def feed(self, text: str) -> StopMatch:
        """Add text. Must not be called after a match."""
        held = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := held.find(stop)) >= 0
        ]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return StopMatch(held[: end if self._is_stop_included else start], stop)
        num_kept = self._num_undecided(held)
        self._held = held[len(held) - num_kept :]
        return StopMatch(held[: len(held) - num_kept])

    def flush(self) -> str:
        """Release held-back text at the end."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
        for num in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-num:]
            if any(stop.startswith(end) for stop in self._stops):
                return num
        return 0
