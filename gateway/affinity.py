"""Which workers have lately seen which prefixes: a bounded memory of hashes of chained token chunks. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

#: Tokens per hashed chunk. Coarser than a block: this guides a choice and proves nothing.
CHUNK_TOKENS = 64

#: Chunks hashed per prompt at most; what two prompts share beyond that changes no choice.
MAX_CHUNKS = 256

Digest = bytes


def prefix_digests(
    token_ids: Sequence[int], tenant: bytes, key: bytes, *, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Digest, ...]:
    """One digest per whole chunk; each covers all tokens before it too. Tenants and keys never share digests."""
    num_chunks = min(len(token_ids) // chunk_tokens, MAX_CHUNKS)
    hasher = hashlib.blake2b(tenant.ljust(16, b"\0"), key=key, digest_size=16)
    data = memoryview(array("I", token_ids[: num_chunks * chunk_tokens])).cast("B")
    step = len(data) // num_chunks if num_chunks else 0
    digests = []
    for chunk in range(num_chunks):
        hasher.update(data[chunk * step : (chunk + 1) * step])
        digests.append(hasher.copy().digest())
    return tuple(digests)


class PrefixAffinity:
    """Least recently used digests are forgotten first; a worker that left is forgotten whole."""

    def __init__(self, max_digests: int, *, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._max_digests = max_digests
        self._chunk_tokens = chunk_tokens
        self._workers: OrderedDict[Digest, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def record(self, digests: Sequence[Digest], worker: str) -> None:
        """`worker` computes, or got, the KV of the prefix that `digests` describe."""
        for digest in reversed(
            digests
        ):  # the shortest prefix last: it is of most use, and forgotten last
            self._workers.setdefault(digest, set()).add(worker)
            self._workers.move_to_end(digest)
        while len(self._workers) > self._max_digests:
            self._workers.popitem(last=False)

    def matched_tokens(self, digests: Sequence[Digest]) -> Mapping[str, int]:
        """By worker: leading tokens that it probably has in its cache. Workers with none are left out."""
        matched: dict[str, int] = {}
        for num_chunks, digest in enumerate(digests, start=1):
            workers = self._workers.get(digest)
            if not workers:
                break
            for worker in workers:
                if matched.get(worker, 0) == (num_chunks - 1) * self._chunk_tokens:
                    matched[worker] = num_chunks * self._chunk_tokens
        return matched

    def forget(self, worker: str) -> None:
        """The worker's cache is gone."""
        for digest in [d for d, workers in self._workers.items() if worker in workers]:
            self._workers[digest].discard(worker)
            if not self._workers[digest]:
                del self._workers[digest]
