"""A record: one full prefix block outside the device, with the proof of its owner.

    header    magic, version, context, key, parent key, tenant, counts, digest of the payload, seal
    token ids of the block, as 32-bit words
    payload   KV of the layer groups that keep all tokens, then of the others if the block was whole

`open` compares all of it with the block that is wanted, before a byte reaches the device:

    context   layout (model, adapters, shape, dtype, block size), numerics class, byte order, and
              the secret of those who may share records
    key       chain key of the block: tenant and adapter, and all tokens from the first on
    parent    chain key of the block before
    tenant    prefix key of the owner
    tokens    the ids themselves
    digest    the payload has not changed; seal: the header has not, and who wrote it has the secret
"""

from __future__ import annotations

import hmac
import json
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final, Protocol

import numpy as np
import xxhash
from blake3 import blake3

from baton.types import NumericsClass
from engine.kv.interface import KvPool
from engine.kv.layout import LayerGroups
from engine.kv.prefix_index import BlockIdentity
from engine.kv.range import ALL, KvRange
from engine.kv.tiers.interface import Record

MAGIC: Final = b"BATONKVR"
VERSION: Final = 1
#: Longest prefix key; see SequenceSpec.prefix_key.
_TENANT_BYTES = 64

#: magic, version, number of token bytes, context, key, parent, length of tenant, tenant, is whole,
#: number of payload bytes, digest of the payload.
_HEADER = struct.Struct(f"<8sII32s32s32sB{_TENANT_BYTES}sBQ32s")
_SEAL_BYTES = 32


class _Move(Protocol):
    """KvPool.pack or KvPool.unpack."""

    def __call__(self, block_ids: Sequence[int], piece: KvRange, data: memoryview, /) -> None: ...


class BadRecord(Exception):
    """A record does not prove what is wanted; the message names the first difference."""


def record_key(identity: BlockIdentity, *, is_whole: bool) -> bytes:
    """Key of a block's record. Records with and without the KV of groups that keep fewer than all
    tokens are kept apart."""
    return identity.key + bytes([is_whole])


class RecordFormat:
    """Writes and checks the records of one worker's pool."""

    def __init__(
        self, groups: LayerGroups, numerics: NumericsClass, secret: bytes, *, is_shared: bool
    ) -> None:
        """secret: 32 bytes, common to all that may share records. is_shared: whether others can
        write where the records are kept, so that the payload's digest must be a keyed one."""
        facts = {
            "layout": asdict(groups.layout),
            "numerics": asdict(numerics),
            "byteorder": sys.byteorder,
            "shared": is_shared,
        }
        self.secret = secret
        self._is_shared = is_shared
        self.context = blake3(json.dumps(facts, sort_keys=True).encode(), key=secret).digest()
        self._groups = groups
        size = groups.layout.block_size
        block = KvRange(0, size, 0, groups.layout.num_layers)
        parts = sorted(groups.split(block), key=self._is_partial)
        self._parts = tuple((part, groups.num_bytes(part)) for part in parts)
        self._kept_parts = tuple(each for each in self._parts if not self._is_partial(each[0]))
        self._tokens_bytes = 4 * size
        self._blank = BlockIdentity(bytes(32), bytes(32), bytes(self._tokens_bytes), b"")
        self._payload_start = _HEADER.size + _SEAL_BYTES + self._tokens_bytes
        self.head_bytes = self._payload_start
        """Bytes before the payload."""
        self.max_bytes = self._payload_start + sum(num_bytes for _, num_bytes in self._parts)
        """Bytes of a whole block's record."""

    def _is_partial(self, part: KvRange) -> bool:
        return part.group != ALL and not self._groups[part.group].keeps_all_tokens

    # Writing

    def pack(
        self, kv: KvPool, block_id: int, identity: BlockIdentity, *, is_whole: bool
    ) -> memoryview:
        """Copy a block's KV, but do not seal it: the caller finds out first whether the block was
        overwritten meanwhile. Raises ValueError if it has lost the slot of a group."""
        parts = self._parts if is_whole else self._kept_parts
        num_bytes = self._payload_start + sum(size for _, size in parts)
        # Not zeroed: new memory is faulted in by the copy, without the GIL.
        record = np.empty(num_bytes, np.uint8).data
        self._copy(kv.pack, block_id, parts, record[self._payload_start :])
        kv.synchronize()
        record[_HEADER.size + _SEAL_BYTES : self._payload_start] = identity.tokens
        return record

    def seal(self, record: memoryview, identity: BlockIdentity, *, is_whole: bool) -> None:
        """Complete a packed record."""
        payload = record[self._payload_start :]
        _HEADER.pack_into(
            record,
            0,
            MAGIC,
            VERSION,
            self._tokens_bytes,
            self.context,
            identity.key,
            identity.parent,
            len(identity.tenant),
            identity.tenant,
            is_whole,
            len(payload),
            self._digest(payload),
        )
        record[_HEADER.size : _HEADER.size + _SEAL_BYTES] = self._seal_of(record)

    # Records of no prompt, to measure tiers

    def blank(self) -> memoryview:
        """A record as large as a whole block's, of arbitrary bytes."""
        record = memoryview(bytearray(os.urandom(self.max_bytes)))
        record[_HEADER.size + _SEAL_BYTES : self._payload_start] = self._blank.tokens
        self.seal(record, self._blank, is_whole=True)
        return record

    def is_blank(self, record: Record) -> bool:
        """Whether `record` is one of `blank`, undamaged."""
        try:
            self.open(record, self._blank, needs_whole=True)
        except BadRecord:
            return False
        return True

    # Reading

    def key_of(self, head: Record) -> bytes | None:
        """record_key of a record by its first head_bytes; None if it is none of this format and
        context, or damaged."""
        if len(head) < self.head_bytes:
            return None
        magic, version, num_tokens_bytes, context, key, *_, is_whole, _, _ = _HEADER.unpack_from(
            head
        )
        is_ours = (magic, version, num_tokens_bytes) == (MAGIC, VERSION, self._tokens_bytes)
        if not is_ours or context != self.context or not self._is_sealed(memoryview(head)):
            return None
        return bytes(key) + bytes([is_whole])

    def open(self, record: Record, identity: BlockIdentity, *, needs_whole: bool) -> memoryview:
        """The payload of a record that proves this identity. Raises BadRecord."""
        view = memoryview(record)
        if len(view) < self._payload_start:
            raise BadRecord("it is truncated")
        magic, version, num_tokens_bytes, context, key, parent, num_tenant, tenant, *rest = (
            _HEADER.unpack_from(view)
        )
        is_whole, num_bytes, digest = rest
        payload = view[self._payload_start : self._payload_start + num_bytes]
        tokens = view[_HEADER.size + _SEAL_BYTES : self._payload_start]
        parts = self._parts if is_whole else self._kept_parts
        faults = {
            "it is no record of KV": magic != MAGIC,
            "its format is another version": version != VERSION,
            "its blocks have another size": num_tokens_bytes != self._tokens_bytes,
            "its model, layout, numerics class or secret is another": context != self.context,
            "its key is another": key != identity.key,
            "it follows another prefix": parent != identity.parent,
            "its owner is another": tenant[:num_tenant] != identity.tenant,
            "its tokens are others": tokens != identity.tokens,
            "it lacks the KV of a layer group": needs_whole and not is_whole,
            "it is truncated": len(payload) != sum(size for _, size in parts),
        }
        for fault, is_there in faults.items():
            if is_there:
                raise BadRecord(fault)
        if not self._is_sealed(view):
            raise BadRecord("its header is damaged")
        if not hmac.compare_digest(digest, self._digest(payload)):
            raise BadRecord("its KV is damaged")
        return payload

    def unpack(self, kv: KvPool, block_id: int, payload: memoryview, *, is_whole: bool) -> None:
        """Copy an opened payload into a block: of all groups if is_whole, else of those that keep
        all tokens."""
        parts = self._parts if is_whole else self._kept_parts
        self._copy(kv.unpack, block_id, parts, payload)

    @staticmethod
    def _copy(
        move: _Move, block_id: int, parts: Sequence[tuple[KvRange, int]], data: memoryview
    ) -> None:
        start = 0
        for part, num_bytes in parts:
            move((block_id,), part, data[start : start + num_bytes])
            start += num_bytes

    def _digest(self, payload: memoryview) -> bytes:
        if self._is_shared:
            return blake3(payload, key=self.secret).digest()
        return xxhash.xxh3_128_digest(payload) + bytes(16)

    def _seal_of(self, record: memoryview) -> bytes:
        seal = blake3(record[: _HEADER.size], key=self.secret)
        seal.update(record[_HEADER.size + _SEAL_BYTES : self._payload_start])
        return seal.digest()

    def _is_sealed(self, record: memoryview) -> bool:
        seal = record[_HEADER.size : _HEADER.size + _SEAL_BYTES]
        return hmac.compare_digest(seal, self._seal_of(record))
