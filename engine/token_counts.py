"""Counts of a growing sequence's tokens, for penalties: a step costs its new tokens, not the
context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY = 256


class TokenCounts:
    """One entry per distinct token of a sequence, with its occurrences in the output. Used by one
    thread."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._entries: dict[int, int] = {}
        """Entry by token; entries are in order of first occurrence."""
        self._firsts: list[int] = []
        """First position of each entry's token."""
        self._tokens = np.empty(_FIRST_CAPACITY, np.int64)
        self._outputs = np.empty(_FIRST_CAPACITY, np.float32)
        self.num_tokens = 0
        """Tokens of the sequence that are counted."""

    @classmethod
    def of(cls, token_ids: Sequence[int], num_prompt_tokens: int) -> TokenCounts:
        counts = cls(num_prompt_tokens)
        counts.follow(token_ids)
        return counts

    def follow(self, token_ids: Sequence[int]) -> TokenCounts:
        """Count the tokens of the sequence that are not counted yet. token_ids: all of it."""
        for token in token_ids[self.num_tokens :]:
            self._add(token)
        return self

    @contextmanager
    def beyond(self, token_ids: Sequence[int]) -> Iterator[TokenCounts]:
        """Counts of a sequence that goes on from this one, such as one with drafts, in the body."""
        known = self.num_tokens
        try:
            yield self.follow(token_ids)
        finally:
            for token in reversed(token_ids[known:]):
                self._remove(token)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Distinct tokens [entries] of prompt and output; valid until the next change."""
        return self._tokens[: len(self._entries)]

    @property
    def outputs(self) -> NDArray[np.float32]:
        """Occurrences in the output [entries]; 0 for tokens of the prompt alone."""
        return self._outputs[: len(self._entries)]

    def _add(self, token: int) -> None:
        entry = self._entries.get(token)
        if entry is None:
            entry = self._entries[token] = len(self._entries)
            self._firsts.append(self.num_tokens)
            if entry == len(self._tokens):
                self._tokens = np.resize(self._tokens, 2 * entry)
                self._outputs = np.resize(self._outputs, 2 * entry)
            self._tokens[entry], self._outputs[entry] = token, 0
        if self.num_tokens >= self._num_prompt_tokens:
            self._outputs[entry] += 1
        self.num_tokens += 1

    def _remove(self, token: int) -> None:
        """Take back the last token."""
        self.num_tokens -= 1
        entry = self._entries[token]
        if self.num_tokens >= self._num_prompt_tokens:
            self._outputs[entry] -= 1
        if self._firsts[entry] == self.num_tokens:
            del self._entries[token]
            self._firsts.pop()
