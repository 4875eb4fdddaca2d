"""Checksums of the KV channel: xxh3_64, against faults of hardware and software, not against forgers.

In version 1 a chunk's covers its payload. Since version 2 it covers the header, too, and a commit's covers the commit:
a payload that is told to be another's, or a token that is changed on the way, does not pass.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from baton.v1 import kv_pb2

_MASK = (1 << 64) - 1
#: ticket_id, epoch, first_token, num_tokens, first_layer, num_layers.
_CHUNK = struct.Struct("<QIIIII")
#: ticket_id, epoch, num_tokens, exposed_us; the ids of the first tokens follow.
_COMMIT = struct.Struct("<QIIQ")


def chunk_checksum(chunk: kv_pb2.KvChunk, payload: Sequence[memoryview], version: int) -> int:
    """Of a chunk whose payload is these pieces, one after the other. Reads what the header says about its place alone."""
    seed = 0
    if version > 1:
        place = (chunk.first_token, chunk.num_tokens, chunk.first_layer, chunk.num_layers)
        seed = xxhash.xxh3_64_intdigest(_CHUNK.pack(chunk.ticket_id, chunk.epoch, *place))
    if len(payload) == 1:
        return xxhash.xxh3_64_intdigest(payload[0], seed)
    digest = xxhash.xxh3_64(seed=seed)
    for piece in payload:
        digest.update(piece)
    return digest.intdigest()


def commit_checksum(commit: kv_pb2.KvCommit, chunks: int, version: int) -> int:
    """Of a commit; chunks: the sum of the checksums of all its ticket's chunks."""
    return (chunks + _commit_digest(commit, version)) & _MASK


def chunks_of_commit(commit: kv_pb2.KvCommit, version: int) -> int:
    """The sum of the chunks' checksums that a commit tells; a wrong one if the commit is not as it was sent."""
    return (commit.checksum - _commit_digest(commit, version)) & _MASK


def _commit_digest(commit: kv_pb2.KvCommit, version: int) -> int:
    if version == 1:
        return 0
    head = _COMMIT.pack(commit.ticket_id, commit.epoch, commit.num_tokens, commit.exposed_us)
    ids = [token.token_id for token in commit.first_tokens]
    return xxhash.xxh3_64_intdigest(head + struct.pack(f"<{len(ids)}I", *ids))
