"""How the two ends of a connection come to terms: the receiver answers a KvHello, the sender takes
the answer or leaves.

The version is the highest that both speak. Since version 2 the receiver chooses the type that KV
travels in.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.interface import KvPool
from baton.errors import NUMERICS_FIX, HandoffFailed, PeerMismatch
from baton.types import ANY_NUMERICS, KvLayout, NumericsRule, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_from_proto, numerics_from_proto
from kv_transfer.codec import ChunkCodec
from kv_transfer.device_codec import DeviceCodec
from kv_transfer.device_memory import device_copy_of
from kv_transfer.version import MAX_VERSION, MIN_VERSION, agreed_version
from kv_transfer.wire_format import agreed_dtype, wire_format


@dataclass(frozen=True, slots=True)
class Terms:
    """What both have agreed on. `codec` is this end's; it belongs to the connection. key: of its
    digests; empty if the workers have no secret. device: where payloads are in a device's memory;
    their checksums know no key."""

    version: int
    codec: ChunkCodec
    key: bytes = b""
    device: DeviceCodec | None = None

    @property
    def on_device(self) -> DeviceCodec:
        """What payloads in a device's memory go through. Raises ValueError where none can be
        there."""
        if self.device is None:
            raise ValueError("a payload in a device's memory, where none was agreed on")
        return self.device


def answer(
    hello: kv_pb2.KvHello,
    pool: KvPool,
    wire_dtype: str,
    checksum: kv_pb2.KvPayloadChecksum.ValueType = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED,
    rule: NumericsRule = ANY_NUMERICS,
) -> Terms | kv_pb2.KvRefuse:
    """The receiver's terms, or what forbids any. wire_dtype: what it wants, one of WIRE_DTYPES.
    checksum: of payloads, as the transport has it. rule: which senders it takes KV of."""
    version = agreed_version(hello.min_version, hello.max_version)
    if version is None:
        return kv_pb2.KvRefuse(
            field="protocol_version",
            expected=f"{MIN_VERSION}..{MAX_VERSION}",
            actual=f"{hello.min_version}..{hello.max_version}",
        )
    ours, theirs = pool.layout, layout_from_proto(hello.layout)
    difference = _difference(ours, theirs, version) or rule.refuses(
        numerics_from_proto(hello.numerics)
    )
    if difference:
        field, expected, actual = difference
        return kv_pb2.KvRefuse(field=field, expected=expected, actual=actual)
    dtype = theirs.dtype if version == 1 else agreed_dtype(theirs.dtype, ours.dtype, wire_dtype)
    codec = ChunkCodec(pool, wire_format(dtype, theirs))
    return Terms(version, codec, device=_device_codec(codec, pool, checksum))


def terms_of(
    accept: kv_pb2.KvAccept, pool: KvPool, peer: WorkerIdentity, rule: NumericsRule
) -> Terms:
    """The sender's, by the answer of `peer`. Raises HandoffFailed if another worker answers,
    PeerMismatch at what this version cannot keep to, or `rule` forbids."""
    told = WorkerIdentity(accept.worker_id, accept.generation)
    if told != peer:
        raise HandoffFailed(
            f"{told.worker_id} generation {told.generation} answers "
            f"in the place of {peer.worker_id} generation {peer.generation}"
        )
    if not MIN_VERSION <= accept.version <= MAX_VERSION:
        ours = f"{MIN_VERSION}..{MAX_VERSION}"
        raise PeerMismatch.of(peer.worker_id, "protocol_version", ours, str(accept.version))
    if difference := rule.refuses(numerics_from_proto(accept.numerics)):
        raise PeerMismatch.of(peer.worker_id, *difference, fix=NUMERICS_FIX)
    dtype = pool.layout.dtype if accept.version == 1 else accept.wire_dtype
    try:
        wire = wire_format(dtype, pool.layout)
    except ValueError:
        raise PeerMismatch.of(peer.worker_id, "wire_dtype", pool.layout.dtype, dtype) from None
    if accept.max_chunk_bytes < wire.token_layer_bytes:
        least, told_bytes = f"at least {wire.token_layer_bytes}", str(accept.max_chunk_bytes)
        raise PeerMismatch.of(peer.worker_id, "max_chunk_bytes", least, told_bytes)
    codec = ChunkCodec(pool, wire)
    device = _device_codec(codec, pool, accept.payload_checksum)
    return Terms(accept.version, codec, device=device)


def _device_codec(
    codec: ChunkCodec, pool: KvPool, checksum: kv_pb2.KvPayloadChecksum.ValueType
) -> DeviceCodec | None:
    """Of a pool whose device shares memory, if payloads are there."""
    copy = device_copy_of(pool)
    is_there = checksum == kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM
    return DeviceCodec(codec, copy) if copy and is_there else None


def _difference(ours: KvLayout, theirs: KvLayout, version: int) -> tuple[str, str, str] | None:
    """(field, ours, theirs) if a sender with that layout cannot write into blocks of ours."""
    if theirs.block_size < 1:
        return "block_size", "at least 1", str(theirs.block_size)
    if version == 1 and theirs.dtype != ours.dtype:
        return "dtype", ours.dtype, theirs.dtype
    return ours.difference(theirs)
