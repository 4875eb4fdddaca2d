"""How the two ends of a connection come to terms, before any ticket is presented: the version is
the highest that both speak, and the receiver chooses the type that KV travels in.

sender                                     receiver
KvHello                     ------------->
                            <-------------  KvAccept, or KvRefuse, and that was all
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
from kv_transfer.codec import ChunkCodec
from kv_transfer.device_memory import DeviceCodec, OnDeviceLost, device_copy_of, raise_device_lost
from kv_transfer.frame import Frame, FrameError
from kv_transfer.kv_secret import KvSecret, has_nonce, new_nonce
from kv_transfer.ticket import Endpoint
from kv_transfer.transport.connection import Connector
from kv_transfer.wire_format import agreed_dtype, wire_format

_log = logging.getLogger("baton.kv")

#: Of the frames behind the handshake that this release speaks. 1: release 0.1.0.
MIN_VERSION = 1
MAX_VERSION = 1


def agreed_version(min_version: int, max_version: int) -> int | None:
    """The highest version that we and a peer of these both speak."""
    version = min(MAX_VERSION, max_version)
    return version if version >= max(MIN_VERSION, min_version) else None


@dataclass(frozen=True, slots=True)
class Terms:
    """What both have agreed on. `codec` is this end's; it belongs to the connection. key: of its
    digests; empty if the workers have no secret. payload_key: of payloads' digests; empty where
    they are plain checksums, with a secret or without. device: where payloads are in a device's
    memory. checksum: of payloads."""

    version: int
    codec: ChunkCodec
    key: bytes = b""
    payload_key: bytes = b""
    device: DeviceCodec | None = None
    checksum: kv_pb2.KvPayloadChecksum.ValueType = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED

    def with_key(self, key: bytes) -> Terms:
        """The same for workers that share a secret; key: the connection's."""
        is_keyed = self.checksum == kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED
        return replace(self, key=key, payload_key=key if is_keyed else b"")

    @property
    def on_device(self) -> DeviceCodec:
        """What payloads in a device's memory go through. Raises ValueError where none can be
        there."""
        if self.device is None:
            raise ValueError("a payload in a device's memory, where none was agreed on")
        return self.device


def receiver_terms(
    hello: kv_pb2.KvHello,
    pool: KvPool,
    wire_dtype: str,
    checksum: kv_pb2.KvPayloadChecksum.ValueType = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED,
    rule: NumericsRule = ANY_NUMERICS,
) -> Terms | kv_pb2.KvRefuse:
    """The receiver's terms, or what forbids any. wire_dtype: what it wants, one of WIRE_DTYPES.
    checksum: of payloads, the best that the transport has. rule: which senders it takes KV of."""
    version = agreed_version(hello.min_version, hello.max_version)
    if version is None:
        return kv_pb2.KvRefuse(
            field="protocol_version",
            expected=f"{MIN_VERSION}..{MAX_VERSION}",
            actual=f"{hello.min_version}..{hello.max_version}",
        )
    ours, theirs = pool.layout, layout_from_proto(hello.layout)
    difference = _difference(ours, theirs) or rule.refuses(numerics_from_proto(hello.numerics))
    if difference:
        field, expected, actual = difference
        return kv_pb2.KvRefuse(field=field, expected=expected, actual=actual)
    dtype = agreed_dtype(theirs.dtype, ours.dtype, wire_dtype)
    codec = ChunkCodec(pool, wire_format(dtype, theirs))
    # A sender of release 0.1.0 names none, and takes word sums where there is no other.
    is_new = checksum == kv_pb2.KV_PAYLOAD_CHECKSUM_XXH3 or hello.payload_checksums
    if is_new and checksum not in hello.payload_checksums:
        checksum = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED
    return Terms(version, codec, device=_device_codec(codec, pool, checksum), checksum=checksum)


def sender_terms(
    accept: kv_pb2.KvAccept, pool: KvPool, peer: WorkerIdentity, rule: NumericsRule
) -> Terms:
    """The sender's, by the answer of `peer`. Raises HandoffFailed if another worker answers,
    PeerMismatch at what this version cannot keep to, or `rule` forbids."""
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
    """Of a pool whose device shares memory, if payloads are there."""
    copy = device_copy_of(pool)
    is_there = checksum == kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM
    return DeviceCodec(codec, copy) if copy and is_there else None


def _difference(ours: KvLayout, theirs: KvLayout) -> tuple[str, str, str] | None:
    """(field, ours, theirs) if a sender with that layout cannot write into blocks of ours."""
    if theirs.block_size < 1:
        return "block_size", "at least 1", str(theirs.block_size)
    return ours.difference(theirs)


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """What all connections of a sender have in common. Times in seconds.

    clock: monotonic. ack_timeout_s: bounds the wait for a credit, and for the answer to a commit.
    max_chunk_bytes: a bound only, for a receiver says how large its chunks may be. secret: KV goes
    only to workers that have it, too; None: to whoever a ticket names. rule: which receivers.
    on_device_lost: see check_device.
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


class SenderSession:
    """The sender's end of one connection: what is agreed on it, what may be sent, how long the
    receiver may be silent. Over as soon as any method raises HandoffFailed: then only `close` of
    the connection may follow.

    terms, max_chunk_bytes: since the receiver's KvAccept; before it terms is None, and nothing may
    be sent.
    deadline: when the receiver must have sent something; None: it need not.
    """

    def __init__(
        self, config: SenderConfig, peer: WorkerIdentity, endpoints: Sequence[Endpoint]
    ) -> None:
        """Connects to the best of the endpoints, where `peer` is to answer. Raises
        TransportError."""
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
            payload_checksums=[
                kv_pb2.KV_PAYLOAD_CHECKSUM_XXH3,
                *([kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM] if device_copy_of(config.pool) else ()),
            ],
        )

    def start(self) -> None:
        """To be called first. Raises what Connection.send does."""
        self.connection.send(self._hello)

    def take(self, frame: Frame) -> None:
        """A frame of the handshake. Raises PeerMismatch if the two cannot work together,
        HandoffFailed if another worker answers, FrameError if the frame has no place here."""
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
        """Check the receiver's proof and send ours; the connection's key."""
        if not has_nonce(accept) or not secret.is_held_by(self._hello, accept):
            theirs = "another" if accept.proof else "none"
            ours = "the one of this worker"
            raise PeerMismatch.of(self._peer.worker_id, "kv_secret", ours, theirs)
        proof = secret.sender_proof(self._hello, accept)
        self.connection.send(kv_pb2.KvProof(proof=proof))
        return secret.connection_key(self._hello, accept)


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """What a receiver offers to every sender, and asks of it.

    num_credits: chunks in flight per connection; each has max_chunk_bytes of staging here. 0 of
    either: open_receiver takes what suits memory of the host, or of the pool's device.
    wire_dtype: what senders are asked to send, one of WIRE_DTYPES. secret: KV is taken only from
    workers that have it, too; None: from whoever presents a ticket. rule: which senders it takes KV
    of. on_device_lost: see check_device.
    """

    identity: WorkerIdentity
    pool: KvPool
    num_credits: int = 0
    max_chunk_bytes: int = 0
    wire_dtype: str = "auto"
    secret: KvSecret | None = None
    rule: NumericsRule = ANY_NUMERICS
    on_device_lost: OnDeviceLost = raise_device_lost


class ReceiverHandshake:
    """The receiver's end of one connection. terms: what both keep to, once the sender may present
    tickets; until then None, and after a refusal for good."""

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
        # Of the sender, from its KvHello on.
        self._worker_id = ""
        # Agreed on, and waiting for this proof.
        self._proposed: Terms | None = None
        self._awaited_proof = b""
        self.terms: Terms | None = None
        self.is_refused = False

    @property
    def peer(self) -> str:
        """The sender, for people."""
        return self._worker_id or "unknown sender"

    def on_frame(self, frame: Frame) -> None:
        """Take a frame that came before `terms`, or any KvHello. Raises FrameError at what does not
        belong here."""
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
            else receiver_terms(hello, config.pool, config.wire_dtype, self._checksum, config.rule)
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
        """Compares in constant time."""
        if not isinstance(frame, kv_pb2.KvProof):
            raise FrameError(f"a {type(frame).__name__} before the KvProof")
        if not hmac.compare_digest(frame.proof, self._awaited_proof):
            raise FrameError("a wrong proof: the sender does not have this worker's KV secret")
        self.terms = terms
        self._seal(terms.key)
