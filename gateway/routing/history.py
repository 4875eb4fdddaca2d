"""Routing history that load reports do not contain. Pure.

PrefixAffinity  workers that recently computed or received each prefix: a bounded map of hashes of
                chained token chunks.
RecentWork      prompt tokens recently given to each worker of a tier, relative to the tier's mean.
                Queue lengths do not show it: between two arrivals all queues are empty. "Recent"
                is measured in work, not in time, so it is independent of the load.
BrokenPairs     pairs of workers that fail to transfer KV, so that not every sequence repeats the
                failure. A first failure, perhaps a flipped bit or a lost connection, rests the
                pair briefly; a second one soon after rests it for long.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass

#: Tokens of the first chunks. Coarser than a block, because this only guides routing.
CHUNK_TOKENS = 64

#: Each later chunk has 1/_GROWTH of the tokens before it, so that a long prompt needs few digests.
_GROWTH = 8

#: Maximum workers per prefix; the most recent are kept. A prefix held by more is also found by
#: chance.
MAX_HOLDERS = 8

#: Maximum workers in an answer, longest match first.
MAX_MATCHES = 16


@dataclass(frozen=True, slots=True)
class Digest:
    """Digest of the first `num_tokens` tokens of a prompt."""

    value: bytes
    num_tokens: int


def prefix_digests(
    token_ids: Sequence[int], tenant: bytes, key: bytes, *, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Digest, ...]:
    """Return one digest per whole chunk; each covers all tokens before it. Digests never match
    across tenants or keys."""
    if len(token_ids) < chunk_tokens:
        return ()
    hasher = PrefixHasher(tenant, key, chunk_tokens)
    hasher.add(token_ids)
    return tuple(hasher.digests)


class PrefixHasher:
    """Computes the digests of `prefix_digests` incrementally."""

    def __init__(self, tenant: bytes, key: bytes, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.digests: list[Digest] = []
        self.num_tokens = 0
        self._hasher = hashlib.blake2b(tenant.ljust(16, b"\0"), key=key, digest_size=16)
        self._chunk_tokens = chunk_tokens
        self._end = chunk_tokens
        """End of the current, incomplete chunk."""

    def copy(self) -> PrefixHasher:
        """Return an independent copy."""
        made = copy(self)
        made.digests, made._hasher = [*self.digests], self._hasher.copy()
        return made

    def add(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        data = memoryview(array("I", token_ids)).cast("B")
        at = 0
        while at < len(token_ids):
            until = min(at + self._end - self.num_tokens, len(token_ids))
            self._hasher.update(data[4 * at : 4 * until])
            self.num_tokens += until - at
            at = until
            if self.num_tokens == self._end:
                self.digests.append(Digest(self._hasher.copy().digest(), self._end))
                num_chunks = max(1, self._end // self._chunk_tokens // _GROWTH)
                self._end += num_chunks * self._chunk_tokens


class PrefixAffinity:
    """LRU map from digests to workers. A worker that leaves is forgotten at once."""

    def __init__(self, max_digests: int) -> None:
        self._max_digests = max_digests
        self._holders: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        """Worker numbers by digest, most recent last."""
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, digests: Sequence[Digest], worker: str) -> None:
        """Record that `worker` has, or will have, the KV of the prefix that `digests` describe."""
        number = self._numbers.get(worker)
        if number is None:
            number = self._numbers[worker] = self._next_number
            self._names[number] = worker
            self._next_number += 1
        for digest in reversed(digests):  # shortest last: it is the most useful, and evicted last
            holders = self._holders.get(digest.value, ())
            if not holders or holders[-1] != number:
                others = tuple(other for other in holders if other != number)
                self._holders[digest.value] = (*others[1 - MAX_HOLDERS :], number)
            self._holders.move_to_end(digest.value)
        while len(self._holders) > self._max_digests:
            self._holders.popitem(last=False)

    def matched_tokens(self, digests: Sequence[Digest]) -> Mapping[str, int]:
        """Leading tokens probably cached, by worker address. Workers without a match are absent."""
        matched: dict[str, int] = {}
        for digest in reversed(digests):
            for number in self._holders.get(digest.value, ()):
                name = self._names.get(number)
                if name is not None:
                    matched.setdefault(name, digest.num_tokens)
            if len(matched) >= MAX_MATCHES:
                break
        return matched

    def forget(self, worker: str) -> None:
        """Forget a worker that lost its cache. It gets a new number if it comes back."""
        number = self._numbers.pop(worker, None)
        if number is not None:
            del self._names[number]


#: A token's weight falls to 1/e once the mean worker has been given this many more tokens.
MEMORY_TOKENS = 262_144

#: Above this weight all sums are rescaled.
_MAX_WEIGHT = 1e9


class RecentWork:
    """Recent tokens of the workers that take work. A worker that joins starts at the mean, so that
    it is neither spared nor flooded.

    Later tokens get larger weights, instead of all sums decaying: the forward decay of Cormode et
    al. (ICDE 2009).
    """

    def __init__(self, memory_tokens: int = MEMORY_TOKENS) -> None:
        self._memory_tokens = memory_tokens
        self._weight = 1.0
        """Weight of a token given now."""
        self._sums: dict[str, float] = {}
        """Weighted tokens by worker."""
        self._total = 0.0

    def add(self, worker: str) -> None:
        """Include `worker`. Idempotent."""
        if worker not in self._sums:
            mean = self._total / len(self._sums) if self._sums else 0.0
            self._sums[worker] = mean
            self._total += mean

    def drop(self, worker: str) -> None:
        """Exclude `worker`. Idempotent."""
        self._total = max(0.0, self._total - self._sums.pop(worker, 0.0))

    def give(self, worker: str, num_tokens: int) -> None:
        """Record `num_tokens` prompt tokens for `worker` to compute. No-op for an excluded
        worker."""
        if worker not in self._sums:
            return
        self._weight *= math.exp(num_tokens / len(self._sums) / self._memory_tokens)
        self._sums[worker] += num_tokens * self._weight
        self._total += num_tokens * self._weight
        if self._weight > _MAX_WEIGHT:
            self._sums = {each: value / self._weight for each, value in self._sums.items()}
            self._total /= self._weight
            self._weight = 1.0

    def ahead(self, worker: str) -> float:
        """Tokens above the tier's mean, negative below it; 0 for an excluded worker."""
        if worker not in self._sums:
            return 0.0
        return (self._sums[worker] - self._total / len(self._sums)) / self._weight


#: Rest of a pair after its first failure, in seconds.
FIRST_REST_S = 2.0
#: Rest after a further failure; and the period after a rest in which a failure counts as a further
#: one, in seconds.
REST_S = 30.0
#: Maximum pairs remembered; the oldest failure is dropped first.
MAX_PAIRS = 512


class BrokenPairs:
    """(sender, receiver) addresses of failed KV transfers. A worker that leaves drops its pairs,
    since it may come back repaired."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[str, str], float] = {}
        """End of each pair's rest, past or future, oldest failure first."""
        self._resting: dict[str, set[str]] = {}
        """Senders of resting pairs, by receiver."""
        self._next_end_s = math.inf
        """Earliest time at which `expire` has work."""

    def note(self, sender: str, receiver: str, now_s: float) -> float | None:
        """Record a failed KV transfer. Return the pair's new rest in seconds; None if the pair
        rests already.

        A transfer that fails during a rest began before it and is ignored.
        """
        self.expire(now_s)
        if sender in self.barred_from(receiver):
            return None
        pair = (sender, receiver)
        rest_s = REST_S if pair in self._until_s else FIRST_REST_S
        self._drop(pair)
        self._until_s[pair] = now_s + rest_s
        self._resting.setdefault(receiver, set()).add(sender)
        self._next_end_s = min(self._next_end_s, now_s + rest_s)
        if len(self._until_s) > MAX_PAIRS:
            self._drop(next(iter(self._until_s)))
        return rest_s

    def barred_from(self, receiver: str) -> Set[str]:
        """Senders that must not be paired with `receiver` now."""
        return self._resting.get(receiver, frozenset())

    def expire(self, now_s: float) -> None:
        """End rests and drop pairs that have expired."""
        if now_s < self._next_end_s:
            return
        ends: list[float] = [math.inf]
        for pair, until_s in tuple(self._until_s.items()):
            if now_s >= until_s + REST_S:
                self._drop(pair)
            elif now_s >= until_s:
                self._wake(pair)
                ends.append(until_s + REST_S)
            else:
                ends.append(until_s)
        self._next_end_s = min(ends)

    def drop(self, worker: str) -> None:
        """Drop all pairs of a worker."""
        for pair in [pair for pair in self._until_s if worker in pair]:
            self._drop(pair)

    def _drop(self, pair: tuple[str, str]) -> None:
        self._until_s.pop(pair, None)
        self._wake(pair)

    def _wake(self, pair: tuple[str, str]) -> None:
        sender, receiver = pair
        resting = self._resting.get(receiver, set())
        resting.discard(sender)
        if not resting:
            self._resting.pop(receiver, None)
