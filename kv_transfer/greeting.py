"""How the two ends of a connection greet each other, before anything is said of a ticket.

sender                                     receiver
KvHello                     ------------->
                            <-------------  KvAccept, or KvRefuse, and that was all
KvProof                     ------------->  if the workers have a secret: see kv_secret.py
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.engine.interface import KvPool
from baton.errors import NUMERICS_FIX, PeerMismatch
from baton.types import NumericsRule, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_to_proto, numerics_to_proto
from kv_transfer.agreement import Terms, answer, terms_of
from kv_transfer.frame import Frame, FrameError
from kv_transfer.kv_secret import KvSecret, has_nonce, new_nonce
from kv_transfer.send_task import SenderConfig
from kv_transfer.transport.base import Connection
from kv_transfer.version import MAX_VERSION, MIN_VERSION


class SenderGreeting:
    """The sender's end of one connection."""

    def __init__(self, config: SenderConfig, peer: WorkerIdentity, connection: Connection) -> None:
        """peer: who is to answer."""
        self._config = config
        self._peer = peer
        self._connection = connection
        self._hello = kv_pb2.KvHello(
            min_version=MIN_VERSION,
            max_version=MAX_VERSION,
            worker_id=config.identity.worker_id,
            generation=config.identity.generation,
            layout=layout_to_proto(config.layout),
            nonce=new_nonce() if config.secret else b"",
            numerics=numerics_to_proto(config.rule.numerics),
        )

    def say_hello(self) -> None:
        """Raises what Connection.send does."""
        self._connection.send(self._hello)

    def accepted(self, accept: kv_pb2.KvAccept) -> Terms:
        """What both keep to from here on. Raises PeerMismatch if there is nothing such,
        HandoffFailed if another answers."""
        terms = terms_of(accept, self._config.pool, self._peer, self._config.rule)
        if self._config.secret is None:
            return terms
        key = self._prove(accept, self._config.secret)
        self._connection.seal(key)
        return replace(terms, key=key)

    def refused(self, refuse: kv_pb2.KvRefuse) -> PeerMismatch:
        """Why there will be no KV."""
        told = (self._peer.worker_id, refuse.field, refuse.actual, refuse.expected)
        if refuse.field.startswith("numerics."):
            return PeerMismatch.of(*told, fix=NUMERICS_FIX)
        return PeerMismatch.of(*told)

    def _prove(self, accept: kv_pb2.KvAccept, secret: KvSecret) -> bytes:
        """Check the receiver's proof and send ours; the connection's key."""
        if not has_nonce(accept) or not secret.is_held_by(self._hello, accept):
            told = "another" if accept.proof else "none"
            raise PeerMismatch.of(self._peer.worker_id, "kv_secret", "the one of this worker", told)
        proof = secret.sender_proof(self._hello, accept)
        self._connection.send(kv_pb2.KvProof(proof=proof))
        return secret.connection_key(self._hello, accept)


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a receiver tells every sender, and asks of it; see Receiver."""

    identity: WorkerIdentity
    pool: KvPool
    num_credits: int
    max_chunk_bytes: int
    wire_dtype: str
    secret: KvSecret | None
    rule: NumericsRule


class ReceiverGreeting:
    """The receiver's end of one connection. terms: what both keep to, once the sender may present
    tickets; until then None, and after a refusal for good."""

    def __init__(
        self,
        welcome: Welcome,
        reply: Callable[[Frame], None],
        seal: Callable[[bytes], None],
        checksum: kv_pb2.KvPayloadChecksum.ValueType,
    ) -> None:
        """reply, seal, checksum: see Receiver.session."""
        self._welcome = welcome
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
        welcome, secret = self._welcome, self._welcome.secret
        terms = (
            kv_pb2.KvRefuse(field="kv_secret", expected="the one of this worker", actual="none")
            if secret and not has_nonce(hello)
            else answer(hello, welcome.pool, welcome.wire_dtype, self._checksum, welcome.rule)
        )
        if isinstance(terms, kv_pb2.KvRefuse):
            self.is_refused = True
            self._reply(terms)
            return
        accept = kv_pb2.KvAccept(
            version=terms.version,
            worker_id=welcome.identity.worker_id,
            generation=welcome.identity.generation,
            num_credits=welcome.num_credits,
            max_chunk_bytes=welcome.max_chunk_bytes,
            wire_dtype=terms.codec.wire.dtype,
            payload_checksum=self._checksum,
            numerics=numerics_to_proto(welcome.rule.numerics),
        )
        if secret:
            accept.nonce = new_nonce()
            accept.proof = secret.receiver_proof(hello, accept)
            self._awaited_proof = secret.sender_proof(hello, accept)
            self._proposed = replace(terms, key=secret.connection_key(hello, accept))
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
