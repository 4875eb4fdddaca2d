"""Which workers have lately seen which prefixes: a bounded memory of hashes of chained token
chunks. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
    hasher = hashlib.blake2b(tenant.ljust(16, b"\0"), key=key, digest_size=16)
    data = memoryview(array("I", token_ids)).cast("B")
    digests = []
    begin, end = 0, chunk_tokens
    while end <= len(token_ids):
        hasher.update(data[4 * begin : 4 * end])
        digests.append(Digest(hasher.copy().digest(), end))
        begin, end = end, end + max(1, end // chunk_tokens // _GROWTH) * chunk_tokens
    return tuple(digests)


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
        number = self._number_of(worker)
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

    def _number_of(self, worker: str) -> int:
        number = self._numbers.get(worker)
        if number is None:
            number = self._numbers[worker] = self._next_number
            self._names[number] = worker
            self._next_number += 1
        return number
