"""Where the end of a text has occurred in it before.

Positions of equal n-grams of the shortest length are chained, latest first, as match finders of
LZ77 compressors do: a token costs one dictionary entry when it is added, and a search looks at a
bounded number of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Positions that a search compares, latest first.
MAX_NUM_CANDIDATES = 16

_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Match:
    """The last `num_tokens` tokens of a text also end at position `end` of it, before its own
    end."""

    end: int
    num_tokens: int


class NgramIndex:
    """An index of one text that grows at its end. The text is given to every call and not kept."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        """Finds matches of min_tokens to max_tokens tokens; longer ones count as max_tokens."""
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = [_NOWHERE] * min_tokens
        """By end position of an n-gram: the end of its occurrence before that one."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in what the text has gained since the last call."""
        size, latest, earlier = self._min_tokens, self._latest, self._earlier
        first = len(earlier)
        news = token_ids[first - size :]
        for end, gram in enumerate(zip(*(news[i:] for i in range(size)), strict=False), first):
            earlier.append(latest.get(gram, _NOWHERE))
            latest[gram] = end

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """The longest match of the end of the text, the latest among equals. The text must be taken
        in."""
        num_tokens = len(token_ids)
        if num_tokens < self._min_tokens:
            return None
        best: Match | None = None
        end = self._earlier[num_tokens]
        for _ in range(MAX_NUM_CANDIDATES):
            if end == _NOWHERE:
                break
            length = self._common_tokens(token_ids, end)
            if best is None or length > best.num_tokens:
                best = Match(end, length)
            if length == self._max_tokens:
                break
            end = self._earlier[end]
        return best

    def _common_tokens(self, token_ids: Sequence[int], end: int) -> int:
        """How far, up to max_tokens, the text before `end` equals its end; at least min_tokens."""
        length, most = self._min_tokens, min(self._max_tokens, end)
        while length < most and token_ids[end - length - 1] == token_ids[-length - 1]:
            length += 1
        return length


def continuation(token_ids: Sequence[int], match: Match, num_tokens: int) -> tuple[int, ...]:
    """The tokens that followed the match; where they reach the end of the text, they go on as the
    text would with them."""
    period = len(token_ids) - match.end
    if num_tokens <= period:
        return tuple(token_ids[match.end : match.end + num_tokens])
    return tuple(token_ids[match.end + i % period] for i in range(num_tokens))
