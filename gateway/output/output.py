"""One output as it grows: tokens merged by index, turned into text, searched for stop strings.
Pure.

Tokens may come twice (from the worker before and the one after a resume, or from both tiers): equal
ones are dropped. A different token at a known index, or a gap, is a fault of ours and never reaches
the client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.errors import EngineFault
from baton.types import FinishReason, Sample
from gateway.intake.decoding import Decoding
from gateway.intake.request import TextOptions
from gateway.output.detokenizer import Detokenizer
from gateway.output.stop_strings import StopMatcher


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new since the last piece. Pieces follow each other without gap. finish, score: set in
    the last one."""

    token_index: int
    samples: tuple[Sample, ...]
    text: str
    finish: FinishReason = FinishReason.NONE
    stop: str | None = None
    stop_token_id: int | None = None
    score: float | None = None


class Output:
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
        """Begin behind tokens that the client has, with so many characters of their text. The
        first thing that is done with the output."""
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
        for index, sample in enumerate(samples[:num_known], start=token_index):
            if self.token_ids[index] != sample.token_id:
                known = self.token_ids[index]
                raise EngineFault(f"token {index} came twice, as {known} and as {sample.token_id}")
        samples = samples[num_known:]
        if self.finish is not FinishReason.NONE or (not samples and finish is FinishReason.NONE):
            return
        self._score = score
        self._feed(samples, finish)
        if self.finish is FinishReason.NONE and finish is not FinishReason.NONE:
            self.finish = finish
            self._flush()

    def take(self) -> Piece | None:
        """All that is new, if anything is; the last piece once the output has ended."""
        is_over = self.finish is not FinishReason.NONE
        if not self._samples and not is_over:
            return None
        samples, text = tuple(self._samples), "".join(self._text)
        self._samples.clear()
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
        return Piece(
            token_index=len(self.token_ids) - len(samples),
            samples=samples,
            text=text,
            finish=self.finish,
            stop=self._stop,
            stop_token_id=stop_token_id,
            score=self._score if is_over else None,
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
            self._text.append(self._detokenizer.feed(token_ids[:num_texts]))
        else:
            num_free = min(max(0, self._min_tokens - num_known), num_texts)
            self._text.append(self._detokenizer.feed(token_ids[:num_free]))
            num_searched = self._search(matcher, token_ids[num_free:num_texts])
            if self._stop is not None:
                num_taken = num_free + num_searched
        self.token_ids.extend(token_ids[:num_taken])
        self._samples.extend(samples[:num_taken])

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

    def _flush(self) -> None:
        """Release what was held back, now that nothing follows."""
        text = self._detokenizer.flush()
        if self._matcher is not None:
            match = self._matcher.feed(text)
            self._text.append(match.text)
            if match.stop is not None:
                self._stop, self.finish = match.stop, FinishReason.STOP
                return
            text = self._matcher.flush()
        self._text.append(text)


def best(outputs: Sequence[Piece], num_returned: int) -> list[Piece]:
    """The outputs with the highest mean log probability, best first, each with that mean as its
    score.

    outputs: each whole, in one piece. Of like ones the earlier is taken. Raises EngineFault if a
    log probability lacks.
    """
    scored = [replace(output, score=_mean_logprob(output)) for output in outputs]
    scored.sort(key=lambda output: -(output.score or 0.0))
    return scored[:num_returned]


def _mean_logprob(output: Piece) -> float:
    logprobs = [sample.logprobs.logprob for sample in output.samples if sample.logprobs]
    if not logprobs or len(logprobs) < len(output.samples):
        raise EngineFault("tokens came without the log probabilities that choose among outputs")
    return math.fsum(logprobs) / len(logprobs)
