"""Handshake of a connection, before any ticket is presented. It agrees on the highest common
version, and the receiver chooses the wire dtype.

sender                                     receiver
KvHello                     ------------->
                            <-------------  KvAccept, or KvRefuse, which ends the connection
KvProof                     ------------->  if the workers have a secret: see kv_secret.py
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.errors import NUMERICS_FIX, HandoffFailed, PeerMismatch
from baton.types import ANY_NUMERICS, KvLayout, NumericsRule, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_from_proto, layout_to_proto, numerics_from_proto, numerics_to_proto
from engine.kv.interface import KvPool
from engine.kv.part import KvPart
from engine.kv.tensors.part import pool_part
from kv_transfer.codec import ChunkCodec
from kv_transfer.device_memory import DeviceCodec, OnDeviceLost, device_copy_of, raise_device_lost
from kv_transfer.frame import Frame, FrameError
from kv_transfer.kv_secret import KvSecret, has_nonce, new_nonce
from kv_transfer.ticket import Endpoint, part_from_proto, part_to_proto
from kv_transfer.transport.connection import Connector
from kv_transfer.wire_format import agreed_dtype, wire_format

_log = logging.getLogger("baton.kv")

#: Lowest version supported after the handshake. 1: release 0.1.0.
MIN_VERSION = 1
MAX_VERSION = 1


def agreed_version(min_version: int, max_version: int) -> int | None:
    """The highest version within both this release's range and the peer's; None if there is
    none."""
    version = min(MAX_VERSION, max_version)
    return version if version >= max(MIN_VERSION, min_version) else None


@dataclass(frozen=True, slots=True)
class Terms:
    """Agreed parameters of a connection.

    codec: of this end; belongs to the connection.
    key: of digests; empty without a secret.
    payload_key: of payload digests; empty for plain checksums, with or without a secret.
    device: codec of payloads in device memory, if they are there.
    checksum: kind of payload checksums.
    part: of the model's KV, that comes over the connection; None for all that the receiver holds.
    """

    version: int
    codec: ChunkCodec
    key: bytes = b""
    payload_key: bytes = b""
    device: DeviceCodec | None = None
    checksum: kv_pb2.KvPayloadChecksum.ValueType = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED
    part: KvPart | None = None

    def with_key(self, key: bytes) -> Terms:
        """The same terms with the connection's key, for workers that share a secret."""
        is_keyed = self.checksum == kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED
        return replace(self, key=key, payload_key=key if is_keyed else b"")

    @property
    def on_device(self) -> DeviceCodec:
        """The codec for payloads in device memory. Raises ValueError if there is none."""
        if self.device is None:
            raise ValueError("a payload in a device's memory, where none was agreed on")
        return self.device


def receiver_terms(
    hello: kv_pb2.KvHello,
    pool: KvPool,
    wire_dtype: str,
    checksum: kv_pb2.KvPayloadChecksum.ValueType = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED,
    rule: NumericsRule = ANY_NUMERICS,
    own: KvPart | None = None,
) -> Terms | kv_pb2.KvRefuse:
    """The receiver's terms, or the reason to refuse.

    wire_dtype: wanted by the receiver, one of WIRE_DTYPES.
    checksum: kind of payload checksums of the transport.
    rule: which senders are accepted.
    own: of the model, that the pool holds; None for all.
    """
    version = agreed_version(hello.min_version, hello.max_version)
    if version is None:
        return kv_pb2.KvRefuse(
            field="protocol_version",
            expected=f"{MIN_VERSION}..{MAX_VERSION}",
            actual=f"{hello.min_version}..{hello.max_version}",
        )
    part = part_from_proto(hello.part) if hello.HasField("part") else None
    if part:
        whole = pool
        try:
            pool = pool_part(pool, part.within(own) if own else part)
        except ValueError as error:
            return kv_pb2.KvRefuse(field="part", expected=str(error), actual=str(part))
        if pool is not whole and checksum == kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM:
            # A device copies whole blocks of a pool; the host copies parts of them.
            checksum = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED
    ours, theirs = pool.layout, layout_from_proto(hello.layout)
    difference = _difference(ours, theirs) or rule.refuses(numerics_from_proto(hello.numerics))
    if difference:
        field, expected, actual = difference
        return kv_pb2.KvRefuse(field=field, expected=expected, actual=actual)
    dtype = agreed_dtype(theirs.dtype, ours.dtype, wire_dtype)
    codec = ChunkCodec(pool, wire_format(dtype, theirs))
    # A sender of release 0.1.0 lists no kinds; it accepts word sums where the transport has no
    # other.
    is_new = checksum == kv_pb2.KV_PAYLOAD_CHECKSUM_XXH3 or hello.payload_checksums
    if is_new and checksum not in hello.payload_checksums:
        checksum = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED
    device = _device_codec(codec, pool, checksum)
    return Terms(version, codec, device=device, checksum=checksum, part=part)


def sender_terms(
    accept: kv_pb2.KvAccept, pool: KvPool, peer: WorkerIdentity, rule: NumericsRule
) -> Terms:
    """The sender's terms from the answer of `peer`. Raises HandoffFailed if another worker answers,
    PeerMismatch if the terms are not supported or `rule` forbids the peer."""
    answering = WorkerIdentity(accept.worker_id, accept.generation)
    if answering != peer:
        raise HandoffFailed(
            f"{answering.worker_id} generation {answering.generation} answers "
            f"in the place of {peer.worker_id} generation {peer.generation}"
        )
    if not MIN_VERSION <= accept.version <= MAX_VERSION:
        ours = f"{MIN_VERSION}..{MAX_VERSION}"
        raise PeerMismatch.of(peer.worker_id, "protocol_version", ours, str(accept.version))
    if difference := rule.refuses(numerics_from_proto(accept.numerics)):
        raise PeerMismatch.of(peer.worker_id, *difference, fix=NUMERICS_FIX)
    try:
        wire = wire_format(accept.wire_dtype, pool.layout)
    except ValueError:
        raise PeerMismatch.of(
            peer.worker_id, "wire_dtype", pool.layout.dtype, accept.wire_dtype
        ) from None
    if accept.max_chunk_bytes < wire.least_chunk_bytes:
        least, offered = f"at least {wire.least_chunk_bytes}", str(accept.max_chunk_bytes)
        raise PeerMismatch.of(peer.worker_id, "max_chunk_bytes", least, offered)
    codec = ChunkCodec(pool, wire)
    device = _device_codec(codec, pool, accept.payload_checksum)
    return Terms(accept.version, codec, device=device, checksum=accept.payload_checksum)


def _device_codec(
    codec: ChunkCodec, pool: KvPool, checksum: kv_pb2.KvPayloadChecksum.ValueType
) -> DeviceCodec | None:
    """The codec for payloads in the pool's device memory; None if payloads are elsewhere."""
    copy = device_copy_of(pool)
    is_there = checksum == kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM
    return DeviceCodec(codec, copy) if copy and is_there else None


def _difference(ours: KvLayout, theirs: KvLayout) -> tuple[str, str, str] | None:
    """(field, ours, theirs) of the first difference that prevents a sender with that layout from
    writing into our blocks; None if compatible."""
    if theirs.block_size < 1:
        return "block_size", "at least 1", str(theirs.block_size)
    return ours.difference(theirs)


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """Settings shared by all connections of a sender. Times in seconds.

    clock: monotonic.
    ack_timeout_s: maximum wait for a credit, and for the answer to a commit.
    max_chunk_bytes: upper limit; the receiver states its own.
    secret: KV is sent only to workers that have it; None: to the worker that the ticket names.
    rule: which receivers are allowed.
    on_device_lost: see check_device.
    ranks: parts of the model that the worker's ranks hold, equal or disjoint; empty if the pool
    holds all. rank: the one with this pool.
    part: of the model, that a connection brings; None for all. Set by the Sender.
    """

    identity: WorkerIdentity
    pool: KvPool
    connect: Connector
    clock: Callable[[], float]
    connect_timeout_s: float = 5.0
    ack_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0
    max_chunk_bytes: int = 16 << 20
    secret: KvSecret | None = None
    rule: NumericsRule = ANY_NUMERICS
    on_device_lost: OnDeviceLost = raise_device_lost
    ranks: tuple[KvPart, ...] = ()
    rank: int = 0
    part: KvPart | None = None

    @property
    def own(self) -> KvPart:
        """What the pool holds, as the model counts layers and heads."""
        return self.ranks[self.rank] if self.ranks else KvPart.whole(self.pool.layout)


class SenderSession:
    """The sender's end of one connection: agreed terms, sending limits, and the receiver's
    deadline. Once a method has raised HandoffFailed, only the connection's `close` may be called.

    terms, max_chunk_bytes: set by KvAccept; terms is None before it, and nothing may be sent.
    deadline: time by which the receiver must have sent a frame; None for no limit.
    """

    def __init__(
        self, config: SenderConfig, peer: WorkerIdentity, endpoints: Sequence[Endpoint]
    ) -> None:
        """Connects to the best usable endpoint of `peer`. Raises TransportError."""
        self._config = config
        self._peer = peer
        self.deadline: float | None = config.clock() + config.connect_timeout_s
        self.connection = config.connect(endpoints, config.connect_timeout_s)
        self.terms: Terms | None = None
        self.max_chunk_bytes = 0
        self._hello = kv_pb2.KvHello(
            min_version=MIN_VERSION,
            max_version=MAX_VERSION,
            worker_id=config.identity.worker_id,
            generation=config.identity.generation,
            layout=layout_to_proto(config.pool.layout),
            nonce=new_nonce() if config.secret else b"",
            numerics=numerics_to_proto(config.rule.numerics),
            part=part_to_proto(config.part) if config.part else None,
            payload_checksums=[
                kv_pb2.KV_PAYLOAD_CHECKSUM_XXH3,
                *([kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM] if device_copy_of(config.pool) else ()),
            ],
        )

    def start(self) -> None:
        """Send KvHello; must be called first. Raises what Connection.send does."""
        self.connection.send(self._hello)

    def take(self, frame: Frame) -> None:
        """Process a handshake frame. Raises PeerMismatch for incompatible workers, HandoffFailed if
        another worker answers, FrameError for an unexpected frame."""
        match frame:
            case kv_pb2.KvAccept() if self.terms is None:
                self._on_accept(frame)
            case kv_pb2.KvRefuse() if self.terms is None:
                difference = (self._peer.worker_id, frame.field, frame.actual, frame.expected)
                if frame.field.startswith("numerics."):
                    raise PeerMismatch.of(*difference, fix=NUMERICS_FIX)
                raise PeerMismatch.of(*difference)
            case _:
                raise FrameError(f"{self._peer.worker_id} sent a {type(frame).__name__} now")

    def _on_accept(self, accept: kv_pb2.KvAccept) -> None:
        config = self._config
        terms = sender_terms(accept, config.pool, self._peer, config.rule)
        if config.secret is not None:
            key = self._prove(accept, config.secret)
            self.connection.seal(key)
            terms = terms.with_key(key)
        self.terms, self.deadline = terms, None
        most = max(config.max_chunk_bytes, terms.codec.wire.least_chunk_bytes)
        self.max_chunk_bytes = min(most, accept.max_chunk_bytes)
        if not terms.codec.is_plain:
            peer, dtype = self._peer.worker_id, config.pool.layout.dtype
            _log.info("KV travels to %s as %s, not %s", peer, terms.codec.wire.dtype, dtype)

    def _prove(self, accept: kv_pb2.KvAccept, secret: KvSecret) -> bytes:
        """Check the receiver's proof, send ours, and return the connection's key."""
        if not has_nonce(accept) or not secret.is_held_by(self._hello, accept):
            theirs = "another" if accept.proof else "none"
            ours = "the one of this worker"
            raise PeerMismatch.of(self._peer.worker_id, "kv_secret", ours, theirs)
        proof = secret.sender_proof(self._hello, accept)
        self.connection.send(kv_pb2.KvProof(proof=proof))
        return secret.connection_key(self._hello, accept)


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """Settings that a receiver applies to every sender.

    num_credits, max_chunk_bytes: chunks in flight per connection, and the staging memory of each;
    0: open_receiver selects what suits host or device memory.
    wire_dtype: requested from senders, one of WIRE_DTYPES.
    secret: KV is accepted only from workers that have it; None: from any worker with a ticket.
    rule: which senders are accepted.
    on_device_lost: see check_device.
    part: of the model, that a rank's pool holds; None for all.
    """

    identity: WorkerIdentity
    pool: KvPool
    num_credits: int = 0
    max_chunk_bytes: int = 0
    wire_dtype: str = "auto"
    secret: KvSecret | None = None
    rule: NumericsRule = ANY_NUMERICS
    on_device_lost: OnDeviceLost = raise_device_lost
    part: KvPart | None = None


class ReceiverHandshake:
    """The receiver's end of the handshake. terms: agreed terms, set once the sender may present
    tickets; stays None after a refusal."""

    def __init__(
        self,
        config: ReceiverConfig,
        reply: Callable[[Frame], None],
        seal: Callable[[bytes], None],
        checksum: kv_pb2.KvPayloadChecksum.ValueType,
    ) -> None:
        """reply, seal, checksum: see Receiver.session."""
        self._config = config
        self._reply = reply
        self._seal = seal
        self._checksum = checksum
        # The sender's id; empty before KvHello.
        self._worker_id = ""
        # Terms that await the sender's KvProof.
        self._proposed: Terms | None = None
        self._awaited_proof = b""
        self.terms: Terms | None = None
        self.is_refused = False

    @property
    def peer(self) -> str:
        """The sender's name for messages."""
        return self._worker_id or "unknown sender"

    def on_frame(self, frame: Frame) -> None:
        """Process a frame before `terms` are set, or any KvHello. Raises FrameError for an
        unexpected frame."""
        if self.is_refused:
            raise FrameError("a frame after the refusal")
        if isinstance(frame, kv_pb2.KvHello):
            self._on_hello(frame)
        elif self._proposed is None:
            raise FrameError(f"a {type(frame).__name__} before the KvHello")
        else:
            self._on_proof(self._proposed, frame)

    def _on_hello(self, hello: kv_pb2.KvHello) -> None:
        if self._proposed is not None or self.terms is not None:
            raise FrameError("a second KvHello")
        config, secret = self._config, self._config.secret
        terms = (
            kv_pb2.KvRefuse(field="kv_secret", expected="the one of this worker", actual="none")
            if secret and not has_nonce(hello)
            else receiver_terms(
                *(hello, config.pool, config.wire_dtype, self._checksum, config.rule, config.part)
            )
        )
        if isinstance(terms, kv_pb2.KvRefuse):
            self.is_refused = True
            self._reply(terms)
            return
        accept = kv_pb2.KvAccept(
            version=terms.version,
            worker_id=config.identity.worker_id,
            generation=config.identity.generation,
            num_credits=config.num_credits,
            max_chunk_bytes=config.max_chunk_bytes,
            wire_dtype=terms.codec.wire.dtype,
            payload_checksum=terms.checksum,
            numerics=numerics_to_proto(config.rule.numerics),
        )
        if secret:
            accept.nonce = new_nonce()
            accept.proof = secret.receiver_proof(hello, accept)
            self._awaited_proof = secret.sender_proof(hello, accept)
            self._proposed = terms.with_key(secret.connection_key(hello, accept))
        else:
            self.terms = terms
        self._worker_id = hello.worker_id
        self._reply(accept)

    def _on_proof(self, terms: Terms, frame: Frame) -> None:
        """Check the sender's proof, in constant time."""
        if not isinstance(frame, kv_pb2.KvProof):
            raise FrameError(f"a {type(frame).__name__} before the KvProof")
        if not hmac.compare_digest(frame.proof, self._awaited_proof):
            raise FrameError("a wrong proof: the sender does not have this worker's KV secret")
        self.terms = terms
        self._seal(terms.key)
