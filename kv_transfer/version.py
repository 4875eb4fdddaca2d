"""Versions of the KV channel, and what a commit looks like in each.

1  the first
2  the receiver chooses the type that KV travels in; a commit brings the first token of any number
   of choices; checksums cover headers (checksum.py); a sender may borrow what the receiver holds
   (KvBorrow)
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.types import Sample
from baton.v1 import kv_pb2
from baton.wire import logprobs_from_proto, sample_from_proto, sample_to_proto

MIN_VERSION = 1
MAX_VERSION = 2
#: The first that has KvBorrow.
BORROW_VERSION = 2
#: Of the frames by which peers agree on a version. It never changes.
HANDSHAKE_VERSION = 1


def agreed_version(min_version: int, max_version: int) -> int | None:
    """The highest version that we and a peer of these both speak."""
    version = min(MAX_VERSION, max_version)
    return version if version >= max(MIN_VERSION, min_version) else None


def can_commit(num_firsts: int, version: int) -> bool:
    """Whether a commit of that version can bring so many first tokens."""
    return version > 1 or num_firsts == 1


def put_first_tokens(commit: kv_pb2.KvCommit, firsts: Sequence[Sample], version: int) -> None:
    """Add first tokens, which can_commit has allowed."""
    if version > 1:
        commit.first_tokens.extend(map(sample_to_proto, firsts))
        return
    (first,) = map(sample_to_proto, firsts)
    commit.first_token_id = first.token_id
    if first.HasField("logprobs"):
        commit.logprobs.CopyFrom(first.logprobs)


def first_tokens_of(commit: kv_pb2.KvCommit, version: int) -> tuple[Sample, ...]:
    """The inverse of put_first_tokens."""
    if version > 1:
        return tuple(map(sample_from_proto, commit.first_tokens))
    logprobs = logprobs_from_proto(commit.logprobs) if commit.HasField("logprobs") else None
    return (Sample(commit.first_token_id, logprobs),)
