"""One output as it grows: tokens merged by index, turned into text, searched for stop strings.
Pure.

Tokens may come twice (from the worker before and the one after a resume, or from both tiers): equal
ones are dropped. A different token at a known index, or a gap, is a fault of ours and never reaches
the client.

Tokens become text not by tokenizers' DecodeStream: it has no flush, waits for ever on bytes that
never become a character, and gives out the characters of a run of byte tokens that a later byte of
the run makes invalid (docs/log.md). What stop strings find does not depend on where pieces are cut.
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

#: Tokens that a new window begins with at least, if more came at once and it may begin among them.
_NUM_CONTEXT = 4

#: Tokens kept undecided before the window is cut inside what looks like one endless broken
#: character.
_MAX_WINDOW = 64


class Piece(NamedTuple):
    """What is new since the last piece. Pieces follow each other without gap. finish, score: set in
    the last one. One is made for each message to a client, so it is of the immutable kind that
    costs least."""

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
        """Stop strings count in the text of the tokens after the first `min_tokens`.

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
        """Of the text to come, those that the client has."""
        self._stop: str | None = None
        self._score: float | None = None
        self.finish = FinishReason.NONE

    def resume(self, token_ids: Sequence[int], num_chars: int) -> None:
        """Begin behind tokens that the client has, with so many characters of the text of all of
        them. The first thing that is done with the output, perhaps piece by piece."""
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
        """Take tokens at token_index, token_index + 1, ...; what is known already is skipped.
        Nothing after the end.

        score: of the whole output, with its last tokens. Raises EngineFault on a gap, or where a
        token differs from the one known.
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
            # Nothing follows: what was held back is released.
            text = self._detokenizer.flush()
            if self._matcher is not None:
                match = self._matcher.feed(text)
                self._stop, self.finish = match.stop, FinishReason.STOP if match.stop else finish
                text = match.text + ("" if match.stop else self._matcher.flush())
            self._text.append(text)

    def take(self) -> Piece | None:
        """All that is new, if anything is; the last piece once the output has ended."""
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
            # The client's own stop token, if that is what ended the output.
            last = self.token_ids[-1]
            stop_token_id = last if last in self._options.user_stop_token_ids else None
        token_index = len(self.token_ids) - len(samples)
        if not is_over:
            return Piece(token_index, samples, text)
        return Piece(
            token_index, samples, text, self.finish, self._stop, stop_token_id, self._score
        )

    def _feed(self, samples: Sequence[Sample], finish: FinishReason) -> None:
        """Add new tokens and their text, up to the one that completes a stop string."""
        token_ids = [sample.token_id for sample in samples]
        num_known = len(self.token_ids)
        # A stop token has no text of its own, unless it was asked for.
        num_texts = len(token_ids)
        if finish is FinishReason.STOP and not self._options.is_stop_included:
            num_texts -= 1
        matcher = self._matcher
        num_taken = len(token_ids)
        if matcher is None:
            # Each step of each sequence comes by here, and nearly none has a stop token to cut off.
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
        """Add the text of tokens up to a stop string. The number of tokens it took."""
        detokenizer_before, matcher_before = self._detokenizer.copy(), matcher.copy()
        match = matcher.feed(self._detokenizer.feed(token_ids))
        self._text.append(match.text)
        if match.stop is None:
            return len(token_ids)
        self._stop, self.finish = match.stop, FinishReason.STOP
        # Several tokens came at once: go through them again, one by one, to find the one that did
        # it.
        for num_taken, token_id in enumerate(token_ids, start=1):
            if matcher_before.feed(detokenizer_before.feed([token_id])).stop is not None:
                return num_taken
        return len(token_ids)


def best(outputs: Sequence[Piece], num_returned: int) -> list[Piece]:
    """The outputs with the highest mean log probability, best first, each with that mean as its
    score.

    outputs: each whole, in one piece. Of like ones the earlier is taken. Raises EngineFault if a
    log probability lacks.
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
    """The pieces, with the flush, are the text of all ids, however the ids were cut into feeds, and
    what was released after some ids does not depend on the cuts either, but for broken characters.

    Text is decoded in a window of ids that begins at a clean border (where the text before it ended
    in a whole character) some ids before those that are new, so that decoders which look to the
    left see what they need. Replacement characters at the end may be a character that lacks bytes:
    they wait. So does a run of byte tokens until it has ended.
    """

    def __init__(self, decoding: Decoding, *, is_continuation: bool = False) -> None:
        """is_continuation: the text keeps a space that it begins with."""
        self._decoding = decoding
        self._decode = decoding.text_of
        self._window: list[int] = list(decoding.lead) if is_continuation else []
        self._num_context = len(self._window)
        """Leading ids of the window whose text was all released."""
        self._num_released = len(self._decode(self._window)) if self._window else 0
        """Characters of the window's text that were released."""
        self._is_whole = True
        """Whether nothing of the window waits."""
        self._open_run: list[int] = []
        """Ids after the window's: a run of byte tokens that may go on."""

    def copy(self) -> Detokenizer:
        """A detokenizer in the same state."""
        other = Detokenizer(self._decoding)
        other._window = list(self._window)
        other._open_run = list(self._open_run)
        other._num_context, other._num_released = self._num_context, self._num_released
        other._is_whole = self._is_whole
        return other

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if self._decoding.kinds:
            self._extend(token_ids, self._decoding.kinds)
        else:
            self._window.extend(token_ids)
        text = self._decode(self._window)
        # In runs that have ended nothing is unfinished.
        whole = text if self._decoding.kinds else text.rstrip(_REPLACEMENT)
        piece = whole[self._num_released :]
        self._is_whole = len(whole) == len(text)
        if not self._is_whole:
            self._num_released = max(self._num_released, len(whole))
            return piece + self._cut_window(text) if len(self._window) > _MAX_WINDOW else piece
        if piece:
            self._begin_window(self._num_context, text)
        elif len(self._window) > _MAX_WINDOW:
            del self._window[self._num_context :]  # these had no text, and will have none
        return piece

    def flush(self) -> str:
        """What is left when no more tokens come: the replacement characters of an unfinished
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
        """Add ids to the window, and to the run behind it those that more bytes may follow."""
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
        """Begin it behind its first `num_old` ids, or later if that is a clean border, too. text:
        of the whole window."""
        window = self._window
        if len(window) - num_old > _NUM_CONTEXT:
            tail = window[-_NUM_CONTEXT:]
            tail_text = self._decode(tail)
            # What decodes to whole characters by itself begins with one.
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
        """Release the front of a window that is broken throughout, where cutting it changes
        nothing."""
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
    """What a feed came to. text: may be released now. stop: the stop string that was found, if one
    was."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Holds back the longest end of the text that may still become a stop string.

    The match that ends first wins; of those that end together, the one that begins first.
    """

    def __init__(self, stops: Sequence[str], *, is_stop_included: bool) -> None:
        """`stops`: at least one, none empty."""
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
        """Add text. Once a stop string is found, feed no more."""
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
        """What is still held, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for num in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-num:]
            if any(stop.startswith(end) for stop in self._stops):
                return num
        return 0
