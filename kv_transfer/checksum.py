"""Checksums of the KV channel: xxh3_64, against faults of hardware and software, not against
forgers.

Between workers that share a secret (kv_secret.py) they are the first 64 bits of blake3 under the
connection's key, over whole header and payload: against forgers, too. A guess is right once in
2^64, and a wrong one ends its handoff.

In version 1 a chunk's covers its payload. Since version 2 it covers the header, too, and a commit's
covers the commit: a payload that is told to be another's, or a token that is changed on the way,
does not pass. What a header says about its chunk's place has a checksum of its own besides, so that
it can be trusted before the payload has come.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash
from blake3 import blake3

from baton.v1 import kv_pb2

_MASK = (1 << 64) - 1
#: ticket_id, epoch, first_token, num_tokens, first_layer, num_layers.
_CHUNK = struct.Struct("<QIIIII")
#: ticket_id, epoch, num_tokens, exposed_us; the ids of the first tokens follow.
_COMMIT = struct.Struct("<QIIQ")


def place_checksum(chunk: kv_pb2.KvChunk) -> int:
    """Of what a header says about its chunk's place: KvChunk.place_checksum."""
    place = (chunk.first_token, chunk.num_tokens, chunk.first_layer, chunk.num_layers)
    return xxhash.xxh3_64_intdigest(_CHUNK.pack(chunk.ticket_id, chunk.epoch, *place))


def chunk_checksum(chunk: kv_pb2.KvChunk, payload: Sequence[memoryview], key: bytes = b"") -> int:
    """Of a chunk whose payload is these pieces, one after the other. Without a key it is the
    payload's xxh3_64, with chunk.place_checksum as its seed. key: the connection's, 32 bytes, or
    none."""
    if key:
        return _keyed(chunk, payload, key)
    if len(payload) == 1:
        return xxhash.xxh3_64_intdigest(payload[0], chunk.place_checksum)
    digest = xxhash.xxh3_64(seed=chunk.place_checksum)
    for piece in payload:
        digest.update(piece)
    return digest.intdigest()


def commit_checksum(commit: kv_pb2.KvCommit, chunks: int, version: int, key: bytes = b"") -> int:
    """Of a commit; chunks: the sum of the checksums of all its ticket's chunks."""
    return (chunks + _commit_digest(commit, version, key)) & _MASK


def chunks_of_commit(commit: kv_pb2.KvCommit, version: int, key: bytes = b"") -> int:
    """The sum of the chunks' checksums that a commit tells; a wrong one if the commit is not as it
    was sent."""
    return (commit.checksum - _commit_digest(commit, version, key)) & _MASK


def _commit_digest(commit: kv_pb2.KvCommit, version: int, key: bytes) -> int:
    if key:
        return _keyed(commit, (), key)
    if version == 1:
        return 0
    head = _COMMIT.pack(commit.ticket_id, commit.epoch, commit.num_tokens, commit.exposed_us)
    ids = [token.token_id for token in commit.first_tokens]
    return xxhash.xxh3_64_intdigest(head + struct.pack(f"<{len(ids)}I", *ids))


def _keyed(
    header: kv_pb2.KvChunk | kv_pb2.KvCommit, payload: Sequence[memoryview], key: bytes
) -> int:
    """Fields of later versions count, too: they are serialised behind those known here, as their
    sender did."""
    bare = type(header)()
    bare.MergeFrom(header)  # type: ignore[arg-type]
    bare.ClearField("checksum")
    data = bare.SerializeToString(deterministic=True)
    name = type(header).__name__.encode()
    digest = blake3(name + len(data).to_bytes(4, "little") + data, key=key)
    for piece in payload:
        digest.update(piece)
    return int.from_bytes(digest.digest(length=8), "little")
