"""Drafts by prompt lookup: what followed the last tokens when they occurred before, in the prompt
or in the output. A draft's confidence is the length of the match: how often drafts behind matches
of a length are right, and so which lengths are worth drafting from, is learned.

Positions of equal n-grams of the shortest length are chained, latest first, as match finders of
LZ77 compressors do: a token costs one dictionary entry when it is added, and a search looks at a
bounded number of positions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from worker_core.speculation.interface import NOTHING, DraftRequest, Estimate, Proposal

#: Tokens of the shortest match, and of the longest: longer ones rank equally.
MIN_TOKENS, MAX_TOKENS = 2, 5

#: Maximum positions that a search compares, latest first.
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
            length, most = self._min_tokens, min(self._max_tokens, end)
            while length < most and token_ids[end - length - 1] == token_ids[-length - 1]:
                length += 1
            if best is None or length > best.num_tokens:
                best = Match(end, length)
            if length == self._max_tokens:
                break
            end = self._earlier[end]
        return best


def continuation(token_ids: Sequence[int], match: Match, num_tokens: int) -> tuple[int, ...]:
    """The tokens that followed the match; where they reach the end of the text, they go on as the
    text would with them."""
    period = len(token_ids) - match.end
    if num_tokens <= period:
        return tuple(token_ids[match.end : match.end + num_tokens])
    return tuple(token_ids[match.end + i % period] for i in range(num_tokens))


class NgramProposer:
    """Implements Proposer. Costs microseconds a sequence: drafts come with the estimate."""

    def __init__(self, min_tokens: int = MIN_TOKENS, max_tokens: int = MAX_TOKENS) -> None:
        """min_tokens, max_tokens: shortest and longest n-gram that is looked up."""
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._indices: dict[Hashable, NgramIndex] = {}

    def estimate(self, requests: Sequence[DraftRequest]) -> list[Estimate]:
        estimates = []
        for request in requests:
            index = self._indices.get(request.key)
            if index is None:
                index = self._indices[request.key] = NgramIndex(self._min_tokens, self._max_tokens)
            index.extend(request.token_ids)
            match = index.find(request.token_ids)
            if match is None:
                estimates.append(NOTHING)
                continue
            drafts = continuation(request.token_ids, match, request.max_num_drafts)
            estimates.append(Estimate(len(drafts), match.num_tokens, drafts))
        return estimates

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal(estimate.drafts) for estimate in self.estimate(requests)]

    def cost_s(self, num_sequences: int, num_drafts: int) -> float:  # noqa: ARG002
        return 0.0

    def forget(self, key: Hashable) -> None:
        self._indices.pop(key, None)
