"""What is remembered of workers, beside what they report. Pure.

PrefixAffinity  which workers have lately seen which prefixes: a bounded memory of hashes of
                chained token chunks
RecentWork      tokens that each worker of a tier was given lately, beside the tier's mean.
                Queues do not show it: between two arrivals they are empty, and the worker that
                did the last thousand prompts looks like the one that did none. "Lately" is
                counted in work, not in time, so it means the same at night and at noon.
BrokenPairs     pairs of workers between which KV does not get through, so that not every
                sequence finds it out. The first failure may be a flipped bit or a lost
                connection: the pair rests for a moment, in which what failed goes another way.
                One that fails again soon after rests for long."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass

#: Tokens of the first chunks. Coarser than a block: this guides a choice and proves nothing.
CHUNK_TOKENS = 64

#: Later chunks are this part of all that is before them: long prompts take few digests, and lose
#: little by it.
_GROWTH = 8

#: Workers remembered per prefix, the latest ones. A prefix that more have is found by chance, too.
MAX_HOLDERS = 8

#: Workers per answer, those with the longest match first.
MAX_MATCHES = 16


@dataclass(frozen=True, slots=True)
class Digest:
    """Stands for the first `num_tokens` tokens of a prompt."""

    value: bytes
    num_tokens: int


def prefix_digests(
    token_ids: Sequence[int], tenant: bytes, key: bytes, *, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Digest, ...]:
    """One digest per whole chunk; each covers all tokens before it too. Tenants and keys never
    share digests."""
    if len(token_ids) < chunk_tokens:
        return ()
    hasher = PrefixHasher(tenant, key, chunk_tokens)
    hasher.add(token_ids)
    return tuple(hasher.digests)


class PrefixHasher:
    """Takes the same digests, of tokens that come one after the other."""

    def __init__(self, tenant: bytes, key: bytes, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.digests: list[Digest] = []
        self.num_tokens = 0
        self._hasher = hashlib.blake2b(tenant.ljust(16, b"\0"), key=key, digest_size=16)
        self._chunk_tokens = chunk_tokens
        self._end = chunk_tokens
        """Of the chunk that is not whole yet."""

    def copy(self) -> PrefixHasher:
        """One that goes on by itself."""
        made = copy(self)
        made.digests, made._hasher = [*self.digests], self._hasher.copy()
        return made

    def add(self, token_ids: Sequence[int]) -> None:
        """Those that follow."""
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
    """Least recently used digests are forgotten first; a worker that left is forgotten whole, and
    at once."""

    def __init__(self, max_digests: int) -> None:
        self._max_digests = max_digests
        self._holders: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        """By digest: numbers of workers, the latest last."""
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, digests: Sequence[Digest], worker: str) -> None:
        """`worker` computes, or got, the KV of the prefix that `digests` describe."""
        number = self._numbers.get(worker)
        if number is None:
            number = self._numbers[worker] = self._next_number
            self._names[number] = worker
            self._next_number += 1
        for digest in reversed(digests):  # the shortest last: it is of most use, and forgotten last
            holders = self._holders.get(digest.value, ())
            if not holders or holders[-1] != number:
                others = tuple(other for other in holders if other != number)
                self._holders[digest.value] = (*others[1 - MAX_HOLDERS :], number)
            self._holders.move_to_end(digest.value)
        while len(self._holders) > self._max_digests:
            self._holders.popitem(last=False)

    def matched_tokens(self, digests: Sequence[Digest]) -> Mapping[str, int]:
        """By worker: leading tokens that it probably has in its cache. Workers with none are left
        out."""
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
        """The worker's cache is gone. Should it come back, it gets another number."""
        number = self._numbers.pop(worker, None)
        if number is not None:
            del self._names[number]


#: What was given counts 1/e once the mean worker has been given this many tokens more.
MEMORY_TOKENS = 262_144

#: Weight from which on it begins at 1 again.
_MAX_WEIGHT = 1e9


class RecentWork:
    """Sums over the workers that take work. One that joins begins at the mean: it is neither spared
    nor flooded.

    Instead of all sums fading, what is given later weighs more, as in the forward decay of Cormode
    et al. (ICDE 2009).
    """

    def __init__(self, memory_tokens: int = MEMORY_TOKENS) -> None:
        self._memory_tokens = memory_tokens
        self._weight = 1.0
        """Of a token that is given now."""
        self._sums: dict[str, float] = {}
        """By worker, of weighted tokens."""
        self._total = 0.0

    def add(self, worker: str) -> None:
        """`worker` takes work from now on. It may be in already."""
        if worker not in self._sums:
            mean = self._total / len(self._sums) if self._sums else 0.0
            self._sums[worker] = mean
            self._total += mean

    def drop(self, worker: str) -> None:
        """`worker` takes no more work. It may be out already."""
        self._total = max(0.0, self._total - self._sums.pop(worker, 0.0))

    def give(self, worker: str, num_tokens: int) -> None:
        """`worker` has been given a prompt of which it has to compute `num_tokens`. Nothing, if it
        takes no work."""
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
        """Tokens above the mean; below, if negative; 0 for one that takes no work."""
        if worker not in self._sums:
            return 0.0
        return (self._sums[worker] - self._total / len(self._sums)) / self._weight


#: How long a pair is not tried again after its first failure, in seconds.
FIRST_REST_S = 2.0
#: How long after a further one; and how long after a rest a failure counts as a further one.
REST_S = 30.0
#: Pairs remembered; those that failed longest ago are forgotten before their time.
MAX_PAIRS = 512


class BrokenPairs:
    """Senders and receivers of KV by address. A worker that leaves takes its pairs with it: it may
    come back mended."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[str, str], float] = {}
        """The ends of rests, over or not, by sender and receiver; those that failed longest ago
        first."""
        self._resting: dict[str, set[str]] = {}
        """The senders of the pairs that rest, by receiver."""
        self._next_end_s = math.inf
        """Nothing is to be forgotten before this."""

    def note(self, sender: str, receiver: str, now_s: float) -> float | None:
        """KV could not be delivered. For how long the pair rests from now on, in seconds; None: it
        does so already.

        What fails while a pair rests was begun before, and is no news.
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
        """The senders that are not to be tried with `receiver`."""
        return self._resting.get(receiver, frozenset())

    def expire(self, now_s: float) -> None:
        """End the rests, and forget the pairs, whose time is over."""
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
        """Forget all pairs of a worker of either tier."""
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
